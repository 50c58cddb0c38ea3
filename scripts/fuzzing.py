"""Whatever takes a file from elsewhere, given files that nobody would write on purpose.

    scripts/fuzz --minutes 2                         # every door, with a seed of its own
    scripts/fuzz --only merge --seed 7               # one door, the same cases again
    scripts/fuzz --repeat artifacts/fuzz/merge-...   # one finding again, with its traceback

A *door* is an entry into AORTA. It gets good and odd inputs of the tests, changed at random, in a process of its own
with limits, and answers or refuses with an error of `aorta/errors.py`. Everything else is a finding: another exception,
more memory or processor time than the size of its files allows, a changed input, or a file where none was asked for.
What was found is the corpus of `tests/test_fuzzing.py`, which is answered or refused now.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import os
import pickle
import re
import resource
import secrets
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

import msgspec
import pandas as pd
from hydra.core.global_hydra import GlobalHydra
from msgspec import structs

import aorta
from aorta import analysis
from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.launch_set import Subject, read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.autopsy.processes import progress_evidence
from aorta.autopsy.report import read_autopsy, verdict_on_run, write_verdict
from aorta.autopsy_command import main as autopsy
from aorta.config.override_words import translate
from aorta.config.profiling import problem_of, selected_ranks
from aorta.documents import as_json
from aorta.errors import AortaError, DeviceUnreadable, GateFailed, Inconclusive, RunIncomplete
from aorta.experiments.launch_engine import PLAN_JOURNAL, Journal, read_journal
from aorta.experiments.launch_folder import open_folder, run_of
from aorta.experiments.plan import read_plan
from aorta.experiments.plan_command import parse
from aorta.merge.merge_traces import merge_traces
from aorta.read.engines import Local
from aorta.read.locations import is_location, label_of, load_source
from aorta.recording.train import available, first_step
from aorta.records.clocks import boot_id
from aorta.records.device_values import from_json, from_text, json_in_output, normalised
from aorta.records.progress import ProgressWatch, UnreadableProgress, progress_files
from aorta.records.ring_file import RingGroup
from aorta.records.ring_record import salvage
from aorta.records.run_files import CALLS_FILE, RPC_FILE, Call, RpcFacts, Worker
from aorta.records.schema import DeviceSample, DeviceTelemetry
from aorta.report.command import overlap_report
from aorta.report.page import page_content
from aorta.report.summary import summarize
from aorta.rpc.rpc_report import rpc_report
from aorta.train_command import compose
from tests.analysis.builders import collective, header, metrics, step, write_manifest, write_rank
from tests.analysis.compare.builders import launch_set
from tests.autopsy.test_flight_recorder import dump, entry
from tests.instrument.test_rows import ByHand
from tests.merge.test_tracks import run_folder
from tests.merge.traces import BASE_NS, text, x
from tests.read.nsys_files import write_nsys
from tests.read.rocprof_files import as_csv, write_rocpd
from tests.read.rocprof_files import as_json as rocprof_json
from tests.recording.test_checkpoint import checkpointed
from tests.records.test_progress import Rank
from tests.records.test_progress import facts as progress_facts

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = str(Path(aorta.__file__).parent)
SAMPLE = ROOT / "tests" / "samples" / "two_gloo_ranks"
KEEP = ROOT / "artifacts" / "fuzz"
LEAST_S, S_PER_BYTE = 5, 5e-6
LEAST_BYTES, BYTES_PER_BYTE = 512 << 20, 512
"""Processor time and memory of a case: of any, and for each byte of its files. Pictures and a page take 2 s."""
WAIT_S: Final = 300.0
"""A case that has not ended after so long waits for ever."""
DENSEST: Final = 40
"""How far traces are compressed, at most: more of what is inflated is no reason to take longer."""
ANSWER, REFUSAL = "answer", "refusal"
_ANSWERS: Final = (None, 0, GateFailed.exit_code, Inconclusive.exit_code, RunIncomplete.exit_code)
"""Exit codes of commands that read what they were given."""
_FORK: Final = get_context("fork")
# Before any case: what it loads itself would count as its time and memory. Arrow reserves a GiB of addresses for the
# first text that pandas gives it.
_LOADED: Final = page_content, pd.Index(["text"])
Tree: TypeAlias = dict[str, bytes | str]
"""A folder as a value: names with contents; a text stands for what is no file: `fifo`, or the target of a link."""


def read_tree(folder: Path) -> Tree:
    return {at.relative_to(folder).as_posix(): at.read_bytes() for at in sorted(folder.rglob("*")) if at.is_file()}


def write_tree(tree: Tree, folder: Path) -> None:
    """Write it below a new folder. What this file system cannot name or place is left out."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in tree.items():
        with contextlib.suppress(OSError, ValueError):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            elif content == "fifo":
                os.mkfifo(folder / name)
            else:
                (folder / name).symlink_to(content)


# --- what doors are given: a folder for each seed ---------------------------------------------------------------------


def _put(folder: Path, name: str, content: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def _each(folder: Path, files: Iterable[Path], name: str = "") -> None:
    """Make a seed of each file; SQL becomes the database that it makes."""
    for file in files:
        if file.suffix == ".sql":
            (folder / file.stem).mkdir()
            with contextlib.suppress(sqlite3.Error):
                sqlite3.connect(folder / file.stem / f"{file.stem}.db").executescript(file.read_text())
        else:
            _put(folder / file.stem, name or file.name, file.read_bytes())


def traces(folder: Path) -> None:
    (packed,) = (SAMPLE / "torch_profiler" / "rank0").iterdir()
    _put(folder / "kineto-gz", "rank0.json.gz", packed.read_bytes())
    _put(folder / "kineto", "rank0.json", gzip.decompress(packed.read_bytes()))
    _put(folder / "rocprofv3", "4242_results.json", json.dumps(rocprof_json()).encode())
    _put(folder / "rocprofv3-gz", "4242_results.json.gz", gzip.compress(json.dumps(rocprof_json()).encode()))
    for variant in ("direct", "rocm-6.2", "convert", "quoted"):
        for name, content in as_csv(variant).items():
            _put(folder / variant, name, content)
    for name, write in (("rocpd", write_rocpd), ("nsys", write_nsys)):
        (folder / name).mkdir()
        write(folder / name / f"{name}.db")
    _each(folder, (ROOT / "tests" / "read" / "corpus").iterdir())


def records(folder: Path) -> None:
    (folder / "devices").mkdir()
    for rank in range(2):
        steps = []
        for number in range(3):
            at_ns = 10**9 * (number + 1) + 5
            sample = DeviceSample(at_ns, at_ns + 9, 65.0, 139.5, 1500.0, 900.0, 87.0, 8 << 30, ["power"])
            more = {"collectives": [collective(seq=number)], "rocm_smi_output": "GPU[0]\t\t: Temperature (C): 31.0"}
            steps.append(step(rank, 2, number, overlap=metrics(10, 8, 4, 2), device=[sample], **more))
        write_rank(folder / "devices", header(rank, 2, device_telemetry=DeviceTelemetry("amdsmi", 1.0)), steps)
    write_manifest(folder / "devices", world_size=2)
    shutil.copytree(SAMPLE, folder / "sample", ignore=shutil.ignore_patterns("torch_profiler"))
    _each(folder, (ROOT / "tests" / "corpus" / "jsonl").glob("*.jsonl"), "rank_0_metrics.jsonl")


def launches(folder: Path) -> None:
    launch_set(folder / "sets" / "reference", [0.5, 0.52, 0.51, 0.5])
    launch_set(folder / "sets" / "candidate", [0.4, 0.41, 0.42, 0.4])


def merge(folder: Path) -> None:
    run_folder(folder / "run")
    for path in run_folder(folder / "records").glob("r?.json"):
        path.unlink()
    _each(folder, sorted((ROOT / "tests" / "merge" / "corpus").glob("*/*.json")), "rank0.json")


def rpc(folder: Path) -> None:
    facts = RpcFacts(
        1,
        [Worker(0, "driver"), Worker(1, "helper")],
        0,
        1,
        True,
        True,
        {"1": "killed"},
        None,
        ended=True,
        finished_windows=1,
    )
    _put(folder / "whole", RPC_FILE, msgspec.json.encode(facts))
    for worker in range(2):
        place = folder / "whole" / "torch_profiler" / f"worker{worker}"
        call = Call(f"{worker}-1", "job", "sync", "f", worker, 1 - worker, 0, None, BASE_NS + 1, True, BASE_NS + 5000)
        _put(place, CALLS_FILE.format(window=0), msgspec.json.encode(call) + b"\n")
        marks = [("rpc_sync#f", 1, 4), (f"job call={1 - worker}-1", 2, 2)]
        memory = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 3, "args": {"Bytes": 64, "Device Type": 0}}
        events = [*(x(*mark, cat="user_annotation") for mark in marks), memory]
        head = {"rpcWorker": {"id": worker, "name": f"w{worker}"}, "profile_memory": 1}
        _put(place, "rpc_window_0000.json", text(events, rank=worker, **head))


def plan(folder: Path) -> None:
    asked = b"""output: plan\nlaunches: 4\nnproc_per_node: 2\nwords: [training.max_steps=40]
environment: {NCCL_ALGO: Ring}\nreference: {words: "parallel=ddp"}
candidate: {words: [parallel=fsdp], environment: {NCCL_ALGO: Tree}}\n"""
    _put(folder / "asked", "plan.yaml", asked)
    _put(folder / "begun", "plan.yaml", asked)
    host = {"name": "n", "machine": "m", "cpus": 2}
    begun = {"plan_version": 3, "asked": {"launches": 4}, "versions": {}, "environment": {}, "host": host}
    journal = b"""{"event": "open", "time": "t"}
{"event": "start", "id": 1, "launch": "reference/00", "time": "t"}
{"event": "end", "id": 1, "launch": "reference/00", "outcome": "done", "run_id": "r", "seconds": 2.5}
{"event": "start", "id": 2, "launch": "candidate/00", "time": "t"}\n"""
    _put(folder / "begun", "plan/plan.json", json.dumps(begun).encode())
    _put(folder / "begun", "plan/journal.jsonl", journal)
    _put(folder / "begun", "plan/reference/00/run.json", json.dumps({"run_id": "r", "world_size": 2}).encode())


def configuration(folder: Path) -> None:
    lines = (
        b"profiling.enabled=true profiling=template profiling.trace_name=rank{rank}/{batch:06d}.json profiling.wait=1",
        b"--override training.max_steps=5 dataset.num_samples=64 --override distributed.mode=fsdp parallel.tensor=2",
        b"fabric=emulated fabric.latency_us=50 telemetry.devices=[host] scheduler.warmup_steps=null +extra=1 ~label",
    )
    for number, line in enumerate(lines):
        _put(folder / str(number), "words.txt", line.replace(b" ", b"\n"))
    _put(folder / "own", "mine.yaml", b"defaults: [default, _self_]\ntraining:\n  max_steps: 9\nlabel: own\n")
    _put(folder / "own", "words.txt", b"--config\nmine.yaml\ntraining.seed=3")


def words(folder: Path) -> None:
    text = b"all\n0, 2,4\nrank{rank}.{batch:06d}.json\n{run_name!r:>20}{epoch_wct:.3f}\n--override=a.b='c d'\nout/*"
    _put(folder / "lines", "words.txt", text)
    _put(folder / "smi", "words.txt", b"GPU[0]\t\t: Temperature (Sensor edge) (C): 31.0\nGPU[0]\t\t: sclk: (9Mhz)\n")
    _put(folder / "json", "words.txt", b'WARNING: x\n{"card0": {"GPU use (%)": "7", "Temperature (C)": "31.0"}}')


def autopsies(folder: Path) -> None:
    done = [entry(number, "completed") for number in range(5)]
    resized = dump([*done, entry(5, "started", input_sizes=[[3]])], 4)
    late = [dump([*done, entry(5, "started")], 3)] * 2 + [dump(done, 3)]
    for name, dumps in (("dumps", [dump([*done, entry(5, "started")], 4), resized] * 2), ("late", late)):
        for rank, dumped in enumerate(dumps):
            _put(folder / name, f"comm_lib_trace_rank_{rank}", pickle.dumps(dumped))
            _put(folder / f"{name}-json", f"rank_{rank}.json", msgspec.json.encode(dumped))
    processes = [{"rank": rank, "host": "h", "pid": rank, "status": {}} for rank in range(3)]
    communicators = [{"hash": "0x1", "size": 3, "ranks": processes[:2], "missing_ranks": processes[2:]}]
    _put(folder / "late", "ras.json", json.dumps({"communicators": communicators}).encode())
    fatal = b'Fatal Python error: Aborted\n\nThread 0x1 [x] (most recent call first):\n  File "a.py", line 3 in f\n'
    for name, host in (("died", socket.gethostname()), ("elsewhere", "another")):
        for rank in range(3):
            about = structs.replace(progress_facts(rank), world_size=4, host=host, boot_id=boot_id(), start_ticks=1)
            about = structs.replace(about, error_file="attempt_0/0/error.json", stack_signal=40)
            by = Rank(folder / name / "progress" / f"rank_{rank}.bin", 16, about)
            group = by.ring.group(RingGroup("0", 1, False, (0, 1, 2, 3)))
            for number in range(3 + (rank == 0)):
                by.progress.begin_step(number)
                index = by.issue(number, group=group)
                if number < 3:
                    by.rows.complete(index, time.perf_counter_ns(), by_wait=False)
                    by.progress.end_step()
            by.ring.close()
        write_rank(folder / name, header(0, 4), [step(0, 4, 0, overlap=metrics(10, 8, 4, 2))])
        _put(folder / name, "progress/rank_1.stacks", fatal)
        _put(folder / name, "attempt_0/0/error.json", b'{"message": {"message": "x", "extraInfo": {"timestamp": "1"}}}')
        for one in progress_evidence(folder / name)[1:]:
            _put(folder / name, f"autopsy/rank_{one.rank}.json", msgspec.json.encode(one))
        write_verdict(folder / name, verdict_on_run(folder / name))


def rings(folder: Path) -> None:
    for slots in (16, 256):
        hand = ByHand(slots, folder / str(slots) / "progress" / "rank_0.bin")
        about = structs.replace(header(0, 2), clock=hand.ring.facts.anchor)
        write_rank(folder / str(slots), about, [], foot=None)
        for number in range(6):
            at = 10 * number
            hand.step(at, at + 9, partial(hand.on_a_link, at + 1, at + 5, at + 3), issued=1)
        hand.ring.close()


def checkpoints(folder: Path) -> None:
    with checkpointed(folder / "one") as (kept, _):
        kept.save(3)


# --- doors: each gets the folder of a case and an empty one to write to, and may give an exit code --------------------


def _location(case: Path) -> Path:
    """The only file of a case, else its folder."""
    inside = list(case.iterdir())
    return inside[0] if len(inside) == 1 else case


def _source(case: Path, out: Path) -> None:
    """Everything that is made of a run folder or of traces, but for pictures and text."""
    run = load_source(_location(case), Local(1))
    subject = Subject(LabelledRun("x", run))
    json.dumps(as_json(summarize({"x": subject, "y": subject}, "x", "y")), allow_nan=False)
    for table in (analysis.steps, analysis.device_samples, analysis.collectives, analysis.user_ranges):
        table(run)


def _compare(case: Path, out: Path) -> None:
    sides = {side: case / side for side in ("reference", "candidate")}
    summary = summarize(read_subjects(sides, Rules(), Local(1)), *sides)
    json.dumps(as_json(summary), allow_nan=False)


def _merge(case: Path, out: Path) -> int:
    align = ("clock", "none", "start_profile")[sum(map(len, map(str, case.rglob("*")))) % 3]
    return merge_traces([str(case), "-o", str(out / "merged.json"), "--window", "all", "--check", "--align", align])


def _plan(case: Path, out: Path) -> None:
    folder = case / "plan"
    run_of(folder / "reference" / "00")
    if folder.is_dir():
        with contextlib.closing(Journal(folder / PLAN_JOURNAL, "in use")):
            read_journal(folder)
        open_folder(read_plan(parse(["--output", str(folder)]), case), {}, {})
    read_plan(parse(["--plan", str(case / "plan.yaml"), "--output", str(out / "plan")]), case)


def _said(case: Path) -> str:
    """What a case gives as words of a command line or in a pipe, which are never anything but plain: bytes that are no
    UTF-8 as surrogates, no zero byte.
    """
    path = case / "words.txt"
    raw = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    return raw.replace(b"\0", b"")[:200_000].decode("utf-8", "surrogateescape")


def _configuration(case: Path, out: Path) -> int:
    given = [word for word in _said(case).split("\n") if word not in ("-m", "--multirun")]
    GlobalHydra.instance().clear()
    sys.argv = ["train.py", *(str(case / word) if word == "mine.yaml" else word for word in given)]
    return compose(lambda _resolved: 0, ROOT / "config")


def _words(case: Path, out: Path) -> None:
    for word in _said(case).split("\n"):
        is_location(word, out, out), label_of(word), problem_of(word)
        with contextlib.suppress(ValueError):
            selected_ranks(word)
        with contextlib.suppress(AortaError):
            translate([word], out, out)
    for cards in (from_text, lambda said: from_json(json_in_output(said))):
        with contextlib.suppress(DeviceUnreadable):
            for card in cards(_said(case)):
                normalised(card)


def _autopsy(case: Path, out: Path) -> int:
    ras = ["--ras", str(case / "ras.json")] if (case / "ras.json").exists() else []
    os.chdir(case)  # where the seeds' error file lies
    ended = [autopsy([str(case), "--stacks", *words]) for words in (ras, ["--live", "--json"])]
    read_autopsy(case), verdict_on_run(case), write_verdict(out, verdict_on_run(case))
    for file in progress_files(case):
        with contextlib.suppress(OSError, UnreadableProgress):
            ProgressWatch(file).state()
    return ended[0]


def _rings(case: Path, out: Path) -> None:
    with contextlib.suppress(shutil.Error):  # of what cannot be copied nothing is read
        shutil.copytree(case, out / "run", symlinks=True)
    salvage(out / "run")


def _checkpoints(case: Path, out: Path) -> None:
    available(case)
    with checkpointed(case) as (kept, _):
        kept.load(first_step(case, 3, "another"))


def _report(case: Path, out: Path) -> int:
    return overlap_report([str(_location(case)), "--output", str(out), "--jobs", "1"])


DOORS: dict[str, tuple[Callable[[Path], None], Callable[[Path, Path], int | None]]] = {
    "traces": (traces, _source),
    "records": (records, _source),
    "report": (records, _report),
    "launches": (launches, _compare),
    "merge": (merge, _merge),
    "rpc": (rpc, lambda case, out: rpc_report([str(case), "-o", str(out / "trace.json.gz"), "--check"])),
    "plan": (plan, _plan),
    "configuration": (configuration, _configuration),
    "words": (words, _words),
    "autopsy": (autopsies, _autopsy),
    "checkpoints": (checkpoints, _checkpoints),
    "rings": (rings, _rings),
}

# --- the mutator ------------------------------------------------------------------------------------------------------

_PARTS: Final = (re.compile(rb"(?<![\w.])-?\d+(\.\d+)?"), re.compile(rb'"[^"\\\n]{0,200}"'))
_TOKENS: Final = (
    *b"0 -1 1.5 1e-400 1e308 1e999 NaN -Infinity inf 0x10 1_000 00012 2147483648 9223372036854775807".split(),
    *b'9223372036854775808 18446744073709551616 null true "" "x" [] {} [1] {"handle":"x"} {"":null} ${a}'.split(),
    *(b"1" + b"0" * 400, b"7" * 5000, "\u0664\u0662".encode(), "\u00b2".encode(), b'"\\ud800"', b'"\\u0000"'),
    *(
        b'"\xff\xfe"',
        b'"\xed\xa0\x80"',
        '"\u202e\u0301\U0001f469\u200d"'.encode(),
        b'"../../etc/passwd"',
        b'"/dev/zero"',
    ),
    *(b'"rank99999999999999999999"', b'"{rank:>999999999}"', b"[" * 980 + b"]" * 980, b"[" * 100_000, b" " * 100_000),
    *(bytes([byte]) for byte in b"\x00\xff\n\r\",{}[]:\\ '"),
)
"""Values at which readers break: edges of number formats, other types, broken Unicode, depth, length, paths."""
GROWN, GROWN_BYTES = 0.04, 1 << 20
"""How often a part of a file is repeated, and to how many bytes."""
PLACES: Final = ("fifo", "nowhere", ".", "..", "/dev/zero", "/dev/null", "/proc/self/mem", "/")
_NAMES: Final = ("rank7", "rank_1_metrics.jsonl", "-", "*", "a::b", "\u0661", "\udcff\udcfe", "a\nb", "x" * 240)


def mutated(random: Random, tree: Tree) -> Tree:
    """Return a changed copy; now and then nothing is changed: seeds have to be answered too."""
    changed = dict(tree)
    for _ in range(random.choice((0, 1, 1, 1, 1, 2, 2, 3, 5))):
        name = random.choice(sorted(changed) or [""])
        content = changed.get(name, b"")
        if random.random() < 0.06:
            folder, slash, last = name.rpartition("/")
            number = re.sub(r"\d+", lambda _: str(random.choice((0, 1, 9, 2**31, 10**25))), last)
            match random.randrange(3):
                case 0:
                    changed.pop(name, None)
                case 1:
                    changed[name] = random.choice(PLACES)
                case 2:
                    changed[folder + slash + random.choice((random.choice(_NAMES), number))] = content
        elif isinstance(content, bytes):
            changed[name] = _content(random, content)
    return changed


def _content(random: Random, content: bytes) -> bytes:
    """Return one file's content with one change, inside what it is packed in more often than outside."""
    with contextlib.suppress(OSError, EOFError, ValueError, LookupError, RecursionError, zlib.error, sqlite3.Error):
        if content.startswith(b"\x1f\x8b") and random.random() < 0.85:
            return gzip.compress(_content(random, gzip.decompress(content)), 1, mtime=0)
        if len(content) < 1 << 20 and random.random() < GROWN:
            return _grown(random, content)
        if content[:1] in (b"{", b"[") and len(content) < 1 << 20 and random.random() < 0.7:
            return _json(random, content)
    at = random.randrange(len(content) + 1)
    end, new = at + random.choice((1, 1, 2, 10, 100, 10_000)), random.choice(_TOKENS)
    found = random.choice(_PARTS).search(content, at)
    token = content[: found.start()] + new + content[found.end() :] if found else content[:at] + new + content[at:]
    byte = content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]
    cut, short, twice = content[:at], content[:at] + content[end:], content[:end] + content[at:]
    return random.choice((token, token, token, byte, cut, short, twice, content[:at] + new + content[at:]))


def _grown(random: Random, content: bytes) -> bytes:
    """Return one file's content with one row, line or element of a list many times, and one value of it different each
    time: what a reader does for each of them, or compares them in, shows in its time and memory.
    """
    if content.startswith(b"SQLite"):
        database = sqlite3.connect(":memory:", isolation_level=None)
        database.deserialize(content)
        table = random.choice(
            [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        )
        names = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")') if not row[5]]
        name = random.choice(names)
        values = [f'"{each}" || n' if each == name else f'"{each}"' for each in names]
        numbers = f"WITH RECURSIVE n(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n LIMIT {GROWN_BYTES // 100})"
        to, first = ", ".join(f'"{each}"' for each in names), f'(SELECT * FROM "{table}" LIMIT 1)'
        database.execute(f'{numbers} INSERT OR IGNORE INTO "{table}" ({to}) SELECT {", ".join(values)} FROM n, {first}')
        return bytes(database.serialize())
    lists = [content[: content.index(b"\n") + 1], *content.splitlines(keepends=True)[1:]] if b"\n" in content else []
    if content[:1] in (b"{", b"[") and b"}\n{" not in content:
        document = json.loads(content)
        holders, left = [], [document]
        while left:
            each = left.pop()
            if isinstance(each, list) and each:
                holders.append(each)
            left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else []
        holder = random.choice(holders)
        part = json.dumps(holder.pop(random.randrange(len(holder)))).encode()
        holder.append("@put-here@")
        before, _, after = json.dumps(document).encode().partition(b'"@put-here@"')
    else:
        at = random.randrange(len(lists))
        before, part, after = b"".join(lists[:at]), lists[at], b"".join(lists[at + 1 :])
    value = random.choice([*re.finditer(rb'(?<![\w.])-?\d+|(?<=")\w[^"\\\n]{0,200}(?=")|\w+', part)])
    begin, end = part[: value.end()], part[value.end() :]
    between = b"" if lists and before + part + after == content else b","
    return before + between.join(b"%b%d%b" % (begin, n, end) for n in range(GROWN_BYTES // len(part))) + after


def _json(random: Random, content: bytes) -> bytes:
    """Return JSON, or one line of JSON Lines, with one value changed. A mark is put there first, because no value is as
    odd as the text that shall stand there.
    """
    lines = content.splitlines(keepends=True) if b"}\n{" in content else [content]
    at = random.randrange(len(lines))
    value = holder = json.loads(lines[at])
    while True:
        key: Any = random.choice(sorted(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
        if not isinstance(holder[key], dict | list) or not holder[key] or random.random() < 0.15:
            break
        holder = holder[key]
    old, new = json.dumps(holder[key]).encode(), random.choice(_TOKENS)
    new = random.choice((new, new, b"[" + old + b"]", b'{"x": ' + old + b"}", b'"' + old[:50] + b'"'))
    if random.random() < 0.2:
        del holder[key]
    else:
        holder[key] = "@put-here@"
    lines[at] = json.dumps(value).encode().replace(b'"@put-here@"', new) + b"\n"
    return b"".join(lines)


# --- the search -------------------------------------------------------------------------------------------------------


def load_seeds(door: str, folder: Path) -> dict[str, Tree]:
    """Make the seeds of a door below a new folder, in a process of its own, in which threads may be left."""
    folder.mkdir(parents=True)
    process = _FORK.Process(target=DOORS[door][0], args=(folder,))
    process.start()
    process.join()
    assert not process.exitcode, f"the seeds of {door} could not be made"
    return {seed.name: read_tree(seed) for seed in sorted(folder.iterdir())}


def size_of(tree: Tree) -> int:
    """Return the bytes of a case's files, inflated."""
    size = 0
    for content in tree.values():
        if isinstance(content, bytes):
            size += len(content)
            if content.startswith(b"\x1f\x8b"):
                with contextlib.suppress(zlib.error):
                    size += len(zlib.decompressobj(31).decompress(content, DENSEST * len(content)))
    return size


def opened(door: str, tree: Tree, place: Path) -> str:
    """Open one case in a process of its own; return `answer`, `refusal`, or the finding with its traceback behind it.
    The files of the case stay in `place/case`.
    """
    write_tree(tree, place / "case")
    write_tree({}, place / "out")
    (place / "said").write_text("it ended without a word")
    size = size_of(tree)
    limit_s, limit_bytes = LEAST_S + math.ceil(S_PER_BYTE * size), LEAST_BYTES + BYTES_PER_BYTE * size
    process = _FORK.Process(target=_child, args=(door, place, limit_s, limit_bytes))
    process.start()
    process.join(WAIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        return "it waits for ever"
    return f"more than {limit_s} s" if process.exitcode == -signal.SIGXCPU else (place / "said").read_text()


def _child(door: str, place: Path, limit_s: int, limit_bytes: int) -> None:
    """Write what becomes of a case into `place/said`."""
    case, out, said = place / "case", place / "out", place / "said"
    os.environ["COLUMNS"] = "80"
    used, status = resource.getrusage(resource.RUSAGE_SELF), Path("/proc/self/status").read_text()
    room = int(re.search(r"VmSize:\s+(\d+)", status)[1]) * 1024 + limit_bytes  # type: ignore[index]
    for kind, limit in (
        (resource.RLIMIT_AS, room),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + limit_s),
    ):
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    before, around = _listing(case), set(place.iterdir())
    os.chdir(out)
    # As a terminal has them: what cannot be encoded fails on stdout, and not on stderr.
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8", errors="strict")  # noqa: SIM115
    sys.stderr = Path(os.devnull).open("w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    try:
        outcome = ANSWER if DOORS[door][1](case, out) in _ANSWERS else REFUSAL
    except AortaError:
        outcome = REFUSAL
    except SystemExit as end:  # argparse
        outcome = ANSWER if end.code in (0, None) else REFUSAL
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(PACKAGE)]
        where = f" at aorta{frames[-1].filename.removeprefix(PACKAGE)}:{frames[-1].lineno}" if frames else ""
        outcome = f"{type(error).__name__}{where}\n{traceback.format_exc()[-8000:]}"
    if door != "plan" and before != _listing(case):
        outcome = "it changed its input"
    if around != set(place.iterdir()):
        outcome = "it wrote outside its output folder"
    said.write_text(outcome, errors="backslashreplace")


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    """Return every entry with its size and time; links are not followed."""
    paths = [Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)]
    return sorted((str(path), path.lstat().st_size, 0 if path.is_dir() else path.lstat().st_mtime_ns) for path in paths)


def search(door: str, seed: int, until: float, scratch: Path) -> dict[str, int]:
    """Open cases of one door until then, one at least, and keep the files of findings; return counts by outcome."""
    seeds, counts = load_seeds(door, scratch / door / "seeds"), Counter[str]()
    while not counts or time.monotonic() < until:
        random = Random(f"{seed}/{door}/{counts.total()}")
        outcome = opened(door, mutated(random, seeds[random.choice(sorted(seeds))]), scratch / door)
        counts[outcome if outcome in (ANSWER, REFUSAL) else "finding"] += 1
        if outcome not in (ANSWER, REFUSAL):
            folder = KEEP / re.sub(r"\W+", "-", f"{door} {outcome.partition(chr(10))[0]}")[:100]
            shutil.rmtree(folder, ignore_errors=True)  # the same finding, kept before
            shutil.copytree(scratch / door / "case", folder / "case", symlinks=True)
            (folder / "door").write_text(door)
            (folder / "traceback.txt").write_text(outcome)
            sys.stdout.write(f"FINDING {outcome.partition(chr(10))[0]}\n  scripts/fuzz --repeat {folder}\n")
    return dict(counts)


def main(arguments: Sequence[str]) -> int:
    """Fuzz, or repeat one finding; returns the exit code: 1 where something was found."""
    options = argparse.ArgumentParser("scripts/fuzz", description="Hostile input for every door; exit 1: a finding.")
    options.add_argument(
        "--minutes", type=float, default=2.0, metavar="N", help="wall-clock time; default: %(default)g"
    )
    options.add_argument("--seed", type=int, default=secrets.randbits(32), metavar="S", help="default: a new one")
    options.add_argument("--only", nargs="+", default=list(DOORS), metavar="DOOR", choices=DOORS, help="these doors")
    options.add_argument("--repeat", type=Path, metavar="DIR", help="one finding again, with its traceback")
    asked = options.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="aorta-fuzz-", ignore_cleanup_errors=True) as scratch:
        if asked.repeat:
            outcome = opened((asked.repeat / "door").read_text(), read_tree(asked.repeat / "case"), Path(scratch))
            sys.stdout.write(f"{outcome}\n")
            return int(outcome not in (ANSWER, REFUSAL))
        begun, share_s = time.monotonic(), 60 * asked.minutes / len(asked.only)
        counts = {
            door: search(door, asked.seed, begun + (at + 1) * share_s, Path(scratch))
            for at, door in enumerate(asked.only)
        }
    findings = sum(found.get("finding", 0) for found in counts.values())
    sys.stdout.write(json.dumps({"seed": asked.seed, "findings": findings, "doors": counts}) + "\n")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
