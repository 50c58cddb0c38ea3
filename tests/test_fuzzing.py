"""What `scripts/fuzz` found is answered or refused now, every door answers its seeds, and what a case does is seen.

An entry of `FOUND` is a seed of a door, a file of it, and what it holds instead; a pair: what is replaced, and by what.
"""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.fuzzing import ANSWER, DOORS, PLACES, REFUSAL, load_seeds, opened


class Runs:
    """Unpickled, it would make a file."""

    def __reduce__(self):
        return (open, ("/tmp/aorta-was-run", "w"))


DEEP, BOMB = b"[" * 100_000, gzip.compress(b" " * (16 << 20), 9, mtime=0) * 64
"""Lists in each other; 1 GiB of blanks in a megabyte: members of a gzip file count as one after the other."""
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


def shares_pages(table: str) -> Callable[[bytes], bytes]:
    """Give a table of a database three levels of pages of which every entry is the same page below it."""

    def changed(content: bytes) -> bytes:
        database = sqlite3.connect(":memory:")
        database.deserialize(content)
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [table]).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
        pages = [content[at : at + size] for at in range(0, len(content), size)]
        pages.append(pages[root - 1])
        for _ in range(3):
            count, page = (size - 12) // 7, bytearray(size)
            entry = struct.pack(">IB", len(pages), 1)  # the page below, and a key
            page[:12] = struct.pack(">BHHHBI", 5, 0, count, size - 5 * count, 0, len(pages))
            page[12 : 12 + 2 * count] = struct.pack(f">{count}H", *range(size - 5 * count, size, 5))
            page[size - 5 * count :] = entry * count
            pages.append(bytes(page))
        pages[root - 1] = pages.pop()
        pages[0] = pages[0][:28] + struct.pack(">I", len(pages)) + pages[0][32:]  # how many there are
        return b"".join(pages)

    return changed


def shared_lists(depth: int) -> bytes:
    holds: list[Any] = ["x"]
    for _ in range(depth):
        holds = [holds, holds]
    return pickle.dumps({"version": "2.1", "nccl_version": holds})


def dump_of(**members: Any) -> bytes:
    return json.dumps({"version": "2.1", **members}).encode()


def of_one_hash(n: int) -> bytes:
    return pickle.dumps(n * (2**61 - 1), 2)[2:-1] + b"N"


DUMP, FOOTER = "comm_lib_trace_rank_0", b'{"record":"footer","reason":'
COUNTERS = b"Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value\n" + b"".join(b"1,k,c%d,1\n" % n for n in range(40_000))
ENTRY = {"process_group": ["0", "default_pg"], "profiling_name": "nccl:send 0->1", "collective_seq_id": 1}
SENT = ENTRY | {"state": "started", "p2p_seq_id": 1}
LINE, CALLS = "rank_0_metrics.jsonl", "torch_profiler/worker0/rpc_calls_0000.jsonl"
WINDOW, FACTS = "torch_profiler/worker0/rpc_window_0000.json", b'{"card0": {"GPU use (%)": '
BATCH = b'"training": {"batch_size": "' + b"9" * 300_000 + b'"}, "workload": {'
FOUND: Final[list[tuple[str, str, str, Any]]] = [
    (ANSWER, "records/devices", "run.json", "fifo"),
    (ANSWER, "records/devices", "run.json", DEEP),
    (ANSWER, "records/devices", "run.json", (b'"workload": {', BATCH)),
    (ANSWER, "records/devices", LINE, (b"8589934592", b"9" * 400)),
    (ANSWER, "records/devices", LINE, (b"1000000005", b"9" * 25)),
    (ANSWER, "records/devices", LINE, (b"139.5", b"1.7e308")),
    (ANSWER, "traces/rocprofv3", "4242_results.json", "\udcff.json"),
    (ANSWER, "merge/run", "clock_sync.json", "fifo"),
    (ANSWER, "rpc/whole", "rpc.json", (b'{"1":', b'{"one":')),
    (ANSWER, "rpc/whole", WINDOW, (b'"profile_memory": 1', b'"profile_memory": ' + b"7" * 40)),
    (REFUSAL, "plan/asked", "plan.yaml", (b"launches: 4", b"launches: ???")),
    (ANSWER, "traces/nsys", "nsys.db", f"UPDATE StringIds SET value = '{'nccl' * 50_000}'"),
    (ANSWER, "traces/direct", "4242_counter_collection.csv", COUNTERS),
    (ANSWER, "autopsy/dumps", DUMP, bytes.fromhex("80025d720000000a2e")),
    (ANSWER, "autopsy/dumps", DUMP, shared_lists(27)),
    (ANSWER, "autopsy/dumps", DUMP, b"\x80\x02}(" + b"".join(map(of_one_hash, range(20_000))) + b"u."),
    (ANSWER, "autopsy/dumps", DUMP, pickle.dumps({"version": "\ud800"})),
    (ANSWER, "autopsy/dumps", DUMP, b"\x80\x02J\x00"),
    (ANSWER, "autopsy/dumps", DUMP, dump_of(pg_config={"0": {"ranks": "[0, 30000000]", "desc": "default_pg"}})),
    (ANSWER, "autopsy/dumps", DUMP, dump_of(pg_config={"0": {"ranks": "7" * 5000}})),
    (ANSWER, "autopsy/dumps", DUMP, dump_of(version="two")),
    (ANSWER, "autopsy/dumps", DUMP, dump_of(entries=[SENT | {"profiling_name": "nccl:send 0->" + "7" * 5000}])),
    (ANSWER, "autopsy/dumps", DUMP, dump_of(entries=[SENT | {"input_sizes": [[2**61] * 9], "input_dtypes": ["Int"]}])),
    (ANSWER, "autopsy/dumps", DUMP, dump_of(entries=[ENTRY | {"collective_seq_id": 10**400}])),
    (ANSWER, "autopsy/dumps", DUMP, "\udcff_0"),
    (ANSWER, "autopsy/died", "progress/rank_1.bin", "fifo"),
    (ANSWER, "autopsy/died", "progress/rank_1.bin", b""),
    (ANSWER, "autopsy/died", "progress/rank_1.bin", (b'"world_size":4', b'"world_size":' + b"9" * 400)),
    (ANSWER, "autopsy/died", "progress/rank_1.bin", (b'"phases":[', b'"phases":' + b"[" * 4000)),
    (ANSWER, "autopsy/died", "progress/rank_1.stacks", "fifo"),
    (ANSWER, "autopsy/died", LINE, "/dev/zero"),
    (ANSWER, "autopsy/died", LINE, lambda lines: lines + FOOTER + DEEP + b"\n"),
    (ANSWER, "autopsy/died", LINE, lambda lines: lines.replace(b'"exit_code":0', b'"signal":{},"exit_code":[0]')),
    (ANSWER, "autopsy/died", "attempt_0/0/error.json", DEEP),
    (ANSWER, "autopsy/died", "attempt_0/0/error.json", b'["message"]'),
    (ANSWER, "autopsy/died", "autopsy/rank_2.json", DEEP),
    (ANSWER, "autopsy/died", "autopsy/rank_2.json", (b'"rank":2', b'"rank":-2')),
    (ANSWER, "words/lines", "words.txt", b"x" * 5000 + b"\nhost:/" + b"x" * 5000),
    (ANSWER, "words/lines", "words.txt", b"{rank:>999999999}\n{epoch_wct:.999999999f}"),
    (ANSWER, "words/json", "words.txt", FACTS + b"7" * 5000 + b"}}"),
    (ANSWER, "words/json", "words.txt", FACTS + b"7" * 400 + b"}}"),
    (ANSWER, "words/json", "words.txt", b"\n" * 100_000),
    (ANSWER, "words/smi", "words.txt", b"GPU[0]\t\t: " + b"x " * 50_000 + b" " * 100_000),
    (ANSWER, "words/smi", "words.txt", b"GPU[0]: sclk clock level: mhz " + b"7" * 100_000),
    (REFUSAL, "traces/kineto", "rank0.json", "fifo"),
    (REFUSAL, "configuration/1", "words.txt", b"--override\ntraining.max_steps=" + b"7" * 5000),
    (REFUSAL, "configuration/own", "mine.yaml", b"defaults: [default, _self_]\n" + LAUGHS.encode()),
    (REFUSAL, "configuration/0", "words.txt", b"--config\n" + b"x" * 5000),
    (REFUSAL, "traces/nsys", "nsys.db", "UPDATE StringIds SET value = zeroblob(3000000)"),
    (REFUSAL, "traces/nsys", "nsys.db", shares_pages("CUPTI_ACTIVITY_KIND_KERNEL")),
    (REFUSAL, "traces/rocpd", "rocpd.db", shares_pages("rocpd_string_00004242_8903_7903_b269_cd8d3745bb8a")),
    (ANSWER, "autopsy/died", "progress/rank_99999999999.bin", lambda _none: b""),
    (REFUSAL, "autopsy/late", "ras.json", (b'"rank": 0', b'"rank": ' + b"7" * 5000)),
    (REFUSAL, "traces/rocprofv3-gz", "4242_results.json.gz", gzip.compress(b"{") + BOMB + gzip.compress(b"}")),
    (REFUSAL, "merge/run", "clock_sync.json", DEEP),
    (REFUSAL, "rpc/whole", CALLS, CALLS.replace("0/", "\u00b2/")),
    (REFUSAL, "rpc/whole", CALLS, (b'"reply_ns":', b'"reply_ns":9' + b"9" * 400)),
    (REFUSAL, "rpc/whole", "rpc.json", DEEP),
    (REFUSAL, "plan/begun", "plan/journal.jsonl", b'{"event": "start", "launch": "reference/00", "order": 0}'),
    (REFUSAL, "plan/begun", "plan/journal.jsonl", DEEP),
    (REFUSAL, "plan/begun", "plan/journal.jsonl", "/dev/zero"),
    (REFUSAL, "plan/asked", "plan.yaml", "fifo"),
    (REFUSAL, "plan/asked", "plan.yaml", (b"launches: 4", b"launches: ${a}")),
    (REFUSAL, "plan/asked", "plan.yaml", LAUGHS.encode()),
    (REFUSAL, "checkpoints/one", "step_3/.metadata", "fifo"),
    (REFUSAL, "checkpoints/one", "step_3/__0_0.distcp", "/dev/zero"),
    (REFUSAL, "checkpoints/one", "step_3/.metadata", pickle.dumps(Runs())),
    (REFUSAL, "checkpoints/one", "step_3/.metadata", bytes.fromhex("80025d720000000a2e")),
]
"""A text that is no place is a new name of the file, or SQL that changes it."""


@pytest.fixture(scope="module")
def seeds_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    return cache(lambda door: load_seeds(door, folder / door))


@pytest.mark.parametrize(("outcome", "seed", "name", "change"), FOUND, ids=range(len(FOUND)))
def test_what_was_found_is_answered_or_refused(outcome, seed, name, change, seeds_of, tmp_path):
    door, _, seed_name = seed.partition("/")
    tree = dict(seeds_of(door)[seed_name])
    if callable(change):
        tree[name] = change(tree.get(name))
    elif isinstance(change, tuple):
        assert change[0] in tree[name]
        tree[name] = tree[name].replace(*change, 1)
    elif isinstance(change, bytes) or change in PLACES:
        tree[name] = change
    elif change.startswith("UPDATE"):
        database = sqlite3.connect(":memory:", isolation_level=None)
        database.deserialize(tree[name])
        database.execute(change)
        tree[name] = bytes(database.serialize())
    else:
        tree[change] = tree.pop(name)
    assert opened(door, tree, tmp_path) == outcome
    assert not Path("/tmp/aorta-was-run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("door", DOORS)
def test_every_door_answers_one_of_its_seeds_as_it_is(door, seeds_of, tmp_path):
    found = {opened(door, tree, tmp_path) for tree in seeds_of(door).values()}
    assert {ANSWER} <= found <= {ANSWER, REFUSAL}
