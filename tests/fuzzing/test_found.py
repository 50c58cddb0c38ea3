"""What the search has found, as a corpus: a seed of a door, and the files that are other than in it.

Each was a traceback, a hang, or more memory than there is. Now it is answered or refused.
"""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.fuzzing.checkpointed  # noqa: F401 - torch: forked processes then have it already
from tests.fuzzing.doors import DOORS, warm
from tests.fuzzing.mutations import bomb
from tests.fuzzing.tree import Special, Tree
from tests.fuzzing.worker import ANSWER, REFUSAL, load_seeds, opened

FIFO, ENDLESS = Special("fifo"), Special("link", "/dev/zero")
LINE = "rank_0_metrics.jsonl"


def swapped(name: str, *pairs: tuple[bytes, bytes]) -> Callable[[Tree], Tree]:
    """Parts of one file replaced."""

    def change(tree: Tree) -> Tree:
        content = tree[name]
        assert isinstance(content, bytes)
        for old, new in pairs:
            assert old in content, old
            content = content.replace(old, new, 1)
        return {**tree, name: content}

    return change


def put(**files: bytes | Special) -> Callable[[Tree], Tree]:
    """Files added or replaced; `__` stands for `/`, `_dot_` for a dot."""
    named = {name.replace("__", "/").replace("_dot_", "."): content for name, content in files.items()}
    return lambda tree: {**tree, **named}


def renamed(old: str, new: str) -> Callable[[Tree], Tree]:
    return lambda tree: {new if name == old else name: content for name, content in tree.items()}


def blobs(tree: Tree) -> Tree:
    """A database with texts of 3 MB in a row."""
    (name,) = tree
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.deserialize(tree[name])
    database.execute("UPDATE StringIds SET value = zeroblob(3000000)")
    return {name: bytes(database.serialize())}


def bomb_in_json(tree: Tree) -> Tree:
    (name,) = tree
    text = gzip.decompress(tree[name])
    return {name: gzip.compress(text[:50]) + bomb() + gzip.compress(text[50:])}


class Runs:
    """Unpickled, it would make a file."""

    def __reduce__(self):
        return (open, ("/tmp/aorta-was-run", "w"))


def pickled(tree: Tree) -> Tree:
    return {**tree, "step_3/.metadata": pickle.dumps(Runs())}


DEEP = b"[" * 100_000
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
START = {"event": "start", "launch": "reference/00", "order": 0, "attempt": 1}
ANSWERED = {
    "a manifest is a pipe": ("records/devices", put(run_dot_json=FIFO)),
    "a manifest has no end": ("records/devices", put(run_dot_json=ENDLESS)),
    "a manifest is nested deeply": ("records/devices", put(run_dot_json=DEEP)),
    "a sample of more than 64 bits": ("records/devices", swapped(LINE, (b"8589934592", b"9" * 30))),
    "a sample beyond floats": ("records/devices", swapped(LINE, (b"8589934592", b"9" * 400))),
    "a sample's time of more than 64 bits": ("records/devices", swapped(LINE, (b"1000000005", b"9" * 25))),
    "a sample near the largest float": ("records/devices", swapped(LINE, (b"139.5", b"1.7e308"))),
    "a size that is a text": (
        "records/devices",
        swapped("run.json", (b'"workload": {', b'"training": {"batch_size": "' + b"9" * 300000 + b'"}, "workload": {')),
    ),
    "a name that is not UTF-8": ("rocprofv3/json", renamed("4242_results.json", "\udcff.json")),
    "a trace's name is not UTF-8": ("merge/run", renamed("r0.json", "\udcff.json")),
    "clocks are a pipe": ("merge/run", put(clock_sync_dot_json=FIFO)),
    "clocks have no end": ("merge/run", put(clock_sync_dot_json=ENDLESS)),
    "a lost worker that is no number": ("rpc/whole", swapped("rpc.json", (b'{"1":', b'{"one":'))),
    "profile_memory of many digits": (
        "rpc/whole",
        swapped(
            "torch_profiler/worker0/rpc_window_0000.json", (b'"profile_memory": 1', b'"profile_memory": ' + b"7" * 40)
        ),
    ),
    "a sweep's line is nested deeply": ("sweep/four", swapped("sweep.jsonl", (b'{"job": "01"', DEEP))),
    "a plan's number is missing": ("plan/asked", swapped("plan.yaml", (b"launches: 4", b"launches: ???"))),
    "words too long for a name": ("words/lines", put(words_dot_txt=b"x" * 5000 + b"\nhost:/" + b"x" * 5000)),
    "a name of a gigabyte": ("words/lines", put(words_dot_txt=b"{rank:>999999999}\n{epoch_wct:.999999999f}")),
    "a number of 5000 digits in JSON": ("smi/json", put(out_dot_txt=b'{"card0": {"x": ' + b"7" * 5000 + b"}}")),
    "a number beyond floats": ("smi/json", put(out_dot_txt=b'{"card0": {"GPU use (%)": ' + b"7" * 400 + b"}}")),
    "a card's line of blanks": ("smi/text", put(out_dot_txt=b"GPU[0]\t\t: " + b"x " * 50000 + b" " * 100000)),
    "a card's clock of digits": ("smi/text", put(out_dot_txt=b"GPU[0]: sclk clock level: mhz " + b"7" * 100000)),
    "blank lines before JSON": ("smi/json", put(out_dot_txt=b"\n" * 100000)),
}
REFUSED = {
    "a trace is a pipe": ("kineto/one-json", put(rank0_dot_json=FIFO)),
    "an override's number of 5000 digits": (
        "configuration/1",
        put(words_dot_txt=b"--override\ntraining.max_steps=" + b"7" * 5000),
    ),
    "texts of megabytes in a database": ("databases/nsys", blobs),
    "a bomb in rocprofv3's JSON": ("rocprofv3/json-gz", bomb_in_json),
    "clocks are nested deeply": ("merge/run", put(clock_sync_dot_json=DEEP)),
    "a worker's folder without a number": (
        "rpc/whole",
        renamed("torch_profiler/worker0/rpc_calls_0000.jsonl", "torch_profiler/worker\u00b2/rpc_calls_0000.jsonl"),
    ),
    "facts nested deeply": ("rpc/whole", put(rpc_dot_json=DEEP)),
    "a call answered beyond any clock": (
        "rpc/whole",
        swapped("torch_profiler/worker0/rpc_calls_0000.jsonl", (b'"reply_ns":', b'"reply_ns":9' + b"9" * 400)),
    ),
    "a journal's start without an id": ("plan/begun", put(plan__journal_dot_jsonl=json.dumps(START).encode())),
    "a journal is nested deeply": ("plan/begun", put(plan__journal_dot_jsonl=DEEP)),
    "a journal has no end": ("plan/begun", put(plan__journal_dot_jsonl=ENDLESS)),
    "a plan is a pipe": ("plan/asked", put(plan_dot_yaml=FIFO)),
    "a plan's number stands elsewhere": ("plan/asked", swapped("plan.yaml", (b"launches: 4", b"launches: ${a}"))),
    "a plan of aliases of aliases": ("plan/asked", put(plan_dot_yaml=LAUGHS.encode())),
    "a configuration of aliases of aliases": (
        "configuration/own",
        put(mine_dot_yaml=b"defaults: [default, _self_]\n" + LAUGHS.encode()),
    ),
    "a configuration's name is too long": ("configuration/0", put(words_dot_txt=b"--config\n" + b"x" * 5000)),
    "a checkpoint's metadata are a pipe": ("checkpoints/one", put(step_3___dot_metadata=FIFO)),
    "a checkpoint's data have no end": ("checkpoints/one", lambda tree: {**tree, "step_3/__0_0.distcp": ENDLESS}),
    "a checkpoint that runs code": ("checkpoints/one", pickled),
}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    warm()
    made: dict[str, dict[str, Tree]] = {}
    folder = tmp_path_factory.mktemp("seeds")

    def of(door):
        if door.name not in made:
            made[door.name] = load_seeds(door, folder / door.name)
        return made[door.name]

    return of


@pytest.mark.parametrize("name", [*ANSWERED, *REFUSED])
def test_what_was_found_is_answered_or_refused(name, seeds, tmp_path):
    seed, change = (ANSWERED | REFUSED)[name]
    door_name, _, seed_name = seed.partition("/")
    (door,) = [door for door in DOORS if door.name == door_name]
    (result,) = opened(door, [change(seeds(door)[seed_name])], tmp_path)
    assert (result.outcome, result.what) == (ANSWER if name in ANSWERED else REFUSAL, ""), result.detail
    assert not Path("/tmp/aorta-was-run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_every_door_answers_one_of_its_seeds_as_it_is(door, seeds, tmp_path):
    found = list(opened(door, list(seeds(door).values()), tmp_path))
    assert {result.outcome for result in found} <= {ANSWER, REFUSAL}, [result for result in found if result.what]
    assert ANSWER in {result.outcome for result in found}
