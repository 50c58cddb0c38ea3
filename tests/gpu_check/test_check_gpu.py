"""`aorta check-gpu` without a device: what its table judges, and why not; what the command refuses and starts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from aorta.errors import ConfigError, RunIncomplete
from aorta.gpu_check import check_command, check_ranks
from aorta.gpu_check.check_ranks import PAIRS
from aorta.gpu_check.check_table import (
    BUSY_SHARE,
    PLACE_NS,
    CheckRow,
    CheckVerdict,
    KernelWindow,
    Pair,
    busy_row,
    busy_share,
    collective_rows,
    matched,
    pooled_ratio,
    ratio_between,
    ratio_row,
    render,
    report_of,
    windows,
)
from tests.runs import ROOT

FACTS = {"world_size": 2, "device": "Stand-in", "torch": "2.13.0", "nccl": "2.27.3"}
OK, FAILED, NOT_JUDGED, INFORMATION = (
    *(CheckVerdict.OK, CheckVerdict.FAILED),
    *(CheckVerdict.NOT_JUDGED, CheckVerdict.INFORMATION),
)
GOOD = CheckRow("ddp", "coverage", "6 of 6 steps", "all", OK)
BAD = CheckRow("fsdp", "synchronisations", "2 waits", "none", FAILED)
INFO = CheckRow("ddp", "host waits", "3", "for information", INFORMATION)
TIME = CheckRow("ddp", "overlap ratio", "0.5 / 0.5", "within 0.02", OK, is_time=True)
UNJUDGED = CheckRow("ddp", "overlap ratio", "0.5 / 0.7", "within 0.02", NOT_JUDGED, "device only 41 % busy", True)


@pytest.mark.parametrize(
    ("own", "kernels", "share", "verdict"),
    [
        # Within two hundredths, where the device is busy.
        ((0.5, 0.5), 0.515, 0.95, OK),
        ((0.5, 0.5), 0.53, BUSY_SHARE, FAILED),
        ((0.5, 0.5), 0.53, 0.89, NOT_JUDGED),
        ((0.5, 0.5), 0.53, None, NOT_JUDGED),
        (None, 0.5, 0.95, NOT_JUDGED),
        ((0.5, 0.5), None, 0.95, NOT_JUDGED),
        # Bounds of a host-bound card have to hold.
        ((0.25, 0.75), 0.769, 0.41, NOT_JUDGED),
        ((0.25, 0.75), 0.78, 0.41, FAILED),
    ],
)
def test_a_ratio_is_held_to_the_kernels_where_the_device_is_busy(own, kernels, share, verdict):
    assert ratio_row("ddp", own, kernels, share).verdict is verdict


def test_what_a_device_that_waits_for_the_host_does_not_answer_is_said():
    between = ratio_between((2.0, 6.0), (2.0, 6.0))
    assert between == (0.25, 0.75)
    row = ratio_row("ddp", between, 0.38, 0.41, 0.01)
    assert (row.verdict, row.value) == (NOT_JUDGED, "0.250 to 0.750 / 0.380")
    assert row.why == "host-bound: the host sets the pace, 0.010 ms ahead; the bounds hold"
    assert report_of(FACTS, [[row]]).exit_code == 4
    assert ratio_between((0.0, 0.0), (0.0, 0.0)) is ratio_between(None, (1.0, 1.0)) is None
    assert busy_row("ddp", 0.412, 0.01).why == "device only 41% busy, the host 0.010 ms ahead of it"
    assert (busy_row("ddp", 0.412).verdict, busy_row("ddp", 0.412).why) == (NOT_JUDGED, "device only 41% busy")
    assert busy_row("ddp", 0.931).verdict is OK
    assert ratio_row("ddp", (0.5, 0.5), 0.7, 0.412).why == "device only 41% busy"
    assert busy_row("ddp", None).why == "the profiler saw no kernel"


def collective(kernel_ns: int, *, start: int = 0, end: int = 0, at: int = 10**9) -> Pair:
    """A kernel of that length, and a record whose start and end lie so much behind its."""
    return (at + start, at + kernel_ns + end), (at, at + kernel_ns)


EXACT, LATE = collective(1_000_000), collective(1_000_000, end=25_000)


@pytest.mark.parametrize(
    ("pairs", "failed"),
    [
        # Four that say what the clocks are apart: nothing.
        ([EXACT] * 4 + [collective(1_000_000, end=15_000)], []),
        ([EXACT] * 4 + [collective(1_000_000, start=-99_000)], []),  # it waited for room: longer, and rightly begun
        ([EXACT] * 4 + [collective(1_000_000, start=-150_000)], ["communication"]),
        ([EXACT] * 4 + [collective(1_000_000, start=25_000)], ["start"]),
        ([EXACT] * 4 + [collective(10_000, end=9_000, start=9_000)], []),
        ([EXACT] * 4 + [collective(10_000, end=-11_000)], ["end"]),  # an end taken before the wait (W1)
        # One end in twenty may be off.
        ([EXACT] * 38 + [LATE] * 2, []),
        ([EXACT] * 38 + [LATE] * 3, ["end"]),
        # What the clocks are apart is taken off, and has a bound of its own.
        ([collective(1_000_000, start=PLACE_NS, end=PLACE_NS)] * 3, []),
        ([collective(1_000_000, start=-PLACE_NS - 1, end=-PLACE_NS - 1)] * 3, ["clocks"]),
    ],
)
def test_durations_ends_and_starts_are_held_to_the_kernels(pairs, failed):
    rows = collective_rows("ddp", pairs, 0.95)
    assert [row.what.partition(",")[0] for row in rows if row.verdict is FAILED] == failed
    assert {row.verdict for row in rows} <= {OK, FAILED}


def test_lengths_are_not_judged_where_copies_belong_to_the_collective():
    rows = collective_rows("ddp", [collective(1_000_000, start=-500_000)] * 4, 0.95, emulated=True)
    assert [row.verdict for row in rows] == [OK, NOT_JUDGED, OK, OK]


@pytest.mark.parametrize(("pairs", "why"), [(None, "differ in number"), ([], "no collective ran a kernel")])
def test_without_pairs_nothing_is_judged(pairs, why):
    rows = collective_rows("ddp", pairs, 0.95)
    assert [(row.verdict, why in (row.why or "")) for row in rows] == [(NOT_JUDGED, True)] * 4
    own = "max(2 % of the kernel, 10 us), of 95 %"
    assert [row.bound for row in rows] == ["within 200 us", "max(2 %, 20 us each)", own, own]


@pytest.mark.parametrize(
    ("rows", "code", "begins"),
    [
        ([GOOD, TIME, INFO], 0, "passed: 2 of 2 checks passed, 0 not judged, 1 for information"),
        ([GOOD, TIME, UNJUDGED], 0, "passed: 2 of 2 checks passed, 1 not judged"),
        ([GOOD, BAD, TIME], 1, "FAILED: 2 of 3 checks passed"),
        ([BAD, UNJUDGED], 1, "FAILED: 0 of 1"),
        ([GOOD, UNJUDGED], 4, "inconclusive: 1 of 1 checks passed, 1 not judged"),
        ([], 4, "inconclusive: 0 of 0"),
    ],
)
def test_the_exit_code_says_what_was_found(rows, code, begins):
    report = report_of(FACTS, [[], rows])  # it may be any rank's
    assert report.exit_code == code
    assert report.verdict.startswith(begins)


def test_every_row_of_every_rank_is_shown_with_its_bound_and_is_plain_json():
    report = report_of(FACTS, [[GOOD, UNJUDGED], [BAD, INFO]])
    text = render(report).splitlines()
    assert text[0] == "2 x Stand-in, torch 2.13.0, NCCL 2.27.3"
    assert text[1].split() == ["rank", "case", "what", "value", "bound"]
    assert [line.split()[0] for line in text[2:6]] == ["0", "0", "1", "1"]
    assert text[3].endswith("within 0.02      not judged: device only 41 % busy")
    assert text[4].endswith("FAILED")
    assert len({line.index(cell) for line, cell in zip(text[2:5], ("all", "within", "none"), strict=True)}) == 1
    assert text[-1].endswith("(exit code 1)")
    assert msgspec.json.decode(msgspec.json.encode(report))["rows"][0][0]["verdict"] == "ok"


BASE = 1_800_000_000_000_000_000


def kernel(name: str, ts_us: float, dur_us: float, *, cat: str = "kernel", device: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts_us, "dur": dur_us, "args": {"device": device}}


TRACE = {
    "baseTimeNanoseconds": BASE,
    "traceEvents": [
        kernel("void ncclDevKernel_AllReduce_Sum_f32(...)", 10, 20),
        kernel("ampere_sgemm", 0, 20),
        kernel("ampere_sgemm", 12, 4),  # inside the one before: counted once
        kernel("ampere_sgemm", 5, 50, device=1),
        kernel("ncclDevKernel_Generic", 5, 50, cat="gpu_user_annotation"),  # carries a stream, and is no kernel
        kernel("rcclGenericKernel", 110, 10),
        kernel("cudaStreamSynchronize", 120, 1, cat="cuda_runtime"),
        kernel("cudaLaunchKernel", 121, 1, cat="cuda_runtime"),
        {"ph": "i", "name": "marker", "ts": 1},
    ],
}
STEPS = [(BASE, BASE + 100_000), (BASE + 100_000, BASE + 200_000)]


def test_kernels_are_told_apart_by_category_name_and_device():
    (first, second), _ = windows(TRACE, STEPS, device=0)
    assert first.comm == [(BASE + 10_000, BASE + 30_000)]
    assert len(first.compute) == 2
    assert (first.lengths_ns([STEPS[0]]), second.lengths_ns([STEPS[1]])) == ((20_000, 10_000), (10_000, 0))
    assert pooled_ratio([first, second], [[step] for step in STEPS]) == pytest.approx(1 / 3)
    assert pooled_ratio([first, second], [[], []]) == 0  # what runs outside of blocks is no computation
    assert pooled_ratio([KernelWindow([], [(0, 1)], 0)], [[(0, 1)]]) is None  # no communication is no ratio
    assert (first.host_waits, second.host_waits) == (0, 1)
    # The busy share is of all steps, and counts every moment once.
    assert busy_share([first, second], STEPS) == pytest.approx(40 / 200)
    assert busy_share([KernelWindow([(0, 60)], [(40, 150)], 0)], [(0, 100)]) == 1.0  # the tail belongs to the next step
    assert busy_share([KernelWindow([], [], 0)], [(0, 100)]) is None
    # Collectives are matched in order or not at all.
    own = [[(BASE + 9_000, BASE + 30_500)], [(BASE + 110_000, BASE + 119_000)]]
    assert matched(own, [first, second]) == [(own[0][0], first.comm[0]), (own[1][0], second.comm[0])]
    assert matched([own[0], []], [first, second]) is None


def test_kernels_are_moved_to_the_records_clock_before_they_are_given_to_steps():
    """The record's second step would begin behind the kernel that belongs to it."""
    events = [kernel("ncclDevKernel", 10, 20), kernel("ncclDevKernel", 102, 4)]
    record = [(start + 8_000, end + 8_000) for start, end in STEPS]
    own = [(BASE + 18_000, BASE + 38_000), (BASE + 110_000, BASE + 114_000)]
    trace = {"baseTimeNanoseconds": BASE, "traceEvents": events}
    (first, second), ahead_ns = windows(trace, record, device=0, collectives=own)
    assert ahead_ns == -8_000
    assert (first.comm, second.comm) == ([own[0]], [own[1]])
    rows = collective_rows("fsdp", matched([[own[0]], [own[1]]], [first, second]), share=1.0, ahead_ns=ahead_ns)
    assert [row.value for row in rows[:2]] == ["+8.0 us", "1.000, single ones +0.0 to +0.0 us"]


# --- the command --------------------------------------------------------------------------------------------------

WRITES = """
import sys
from pathlib import Path
path, code = Path(sys.argv[1]), int(sys.argv[2].rpartition("=")[2])
if code < 10:
    path.write_text('{"facts": {}, "rows": [], "verdict": "", "exit_code": %d}' % code)
sys.exit(0 if code < 10 else 1)
"""


@pytest.fixture
def launched(monkeypatch):
    """A machine of two devices; what is started in place of torchrun writes a report. Gives its words."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("NPROC", raising=False)
    words: list[str] = []
    real = subprocess.Popen

    def start(given, **keywords):
        words[:] = given
        return real([sys.executable, "-c", WRITES, given[given.index("aorta.gpu_check.check_ranks") + 1], given[-1]])

    monkeypatch.setattr(subprocess, "Popen", start)
    return words


def test_without_a_device_or_with_a_wrong_word_nothing_starts(launched, monkeypatch, capsys, tmp_path):
    assert check_command.main(["--json", str(tmp_path / "x.json"), "training.batch_size=0"]) == 1
    assert "training.batch_size=0" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_command.main([]) == 1
    assert capsys.readouterr().err.strip() == f"error: {check_command.NO_DEVICE}"
    assert launched == []


@pytest.mark.parametrize(("text", "devices", "a_device", "expected"), [("", 4, 1, 4), ("2", 4, 1, 2), (None, 1, 2, 2)])
def test_one_process_a_device_unless_told_otherwise(text, devices, a_device, expected):
    assert check_command.processes({} if text is None else {"NPROC": text}, devices, a_device) == expected


@pytest.mark.parametrize(("text", "devices", "a_device"), [("0", 4, 1), ("x", 4, 1), ("5", 4, 1), ("3", 1, 2)])
def test_a_number_of_processes_that_cannot_be(text, devices, a_device):
    most = devices * a_device
    with pytest.raises(ConfigError, match=rf"NPROC='{text}': must be a whole number of processes, 1 to {most}"):
        check_command.processes({"NPROC": text}, devices, a_device)


@pytest.mark.parametrize(
    ("code", "words", "ranks"), [(0, ["training.ranks_per_device=2"], "4"), (1, [], "2"), (4, [], "2")]
)
def test_the_exit_code_is_the_report_s_and_ranks_are_as_many_as_asked_for(
    launched, tmp_path, capsys, code, words, ranks
):
    path, words = tmp_path / "x.json", [*words, f"training.seed={code}"]
    assert check_command.main(["--json", str(path), "parallel=ddp,tp", *words]) == code
    assert launched[launched.index(str(path)) :] == [str(path), "ddp,tp", str(PAIRS), *words]
    assert launched[launched.index("--nproc_per_node") + 1] == ranks
    assert capsys.readouterr().out == f"the same as JSON: {path}\n"


@pytest.mark.parametrize("text", ["0", "x"])
def test_a_number_of_pairs_that_cannot_be(text, capsys):
    with pytest.raises(SystemExit):
        check_command.parser().parse_args(["--pairs", text])
    assert "must be a whole number from 1 on" in capsys.readouterr().err


def test_ranks_that_end_early_do_not_leave_an_older_report_to_answer(launched, tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"facts": {}, "rows": [], "verdict": "", "exit_code": 0}')
    with pytest.raises(RunIncomplete, match="ended with exit code 1 before the table was written"):
        check_command.checked(path, 2, ["ddp"], ["10"])
    assert not path.exists()


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("environment", "platform", "rows"),
    [
        ({}, "cuda", [(QUEUES, "not set", OK)]),
        ({QUEUES: "8"}, "cuda", [(QUEUES, "=8", OK)]),
        # One hardware queue for all streams.
        ({QUEUES: "1"}, "cuda", [(QUEUES, "=1", FAILED), (f"{QUEUES}=1", "", INFORMATION)]),
        ({"GPU_MAX_HW_QUEUES": "2"}, "rocm", [("GPU_MAX_HW_QUEUES=2", "share a queue", INFORMATION)]),
    ],
)
def test_settings_that_change_the_answer_are_told(environment, platform, rows):
    found = check_ranks.setting_rows(environment, platform)
    assert [(row.what, row.verdict) for row in found] == [(what, verdict) for what, _, verdict in rows]
    assert all(value in row.value for row, (_, value, _) in zip(found, rows, strict=True))


def test_it_runs_where_no_developer_s_tools_are():
    """In a fresh interpreter in which pytest and hypothesis cannot be imported."""
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('pytest', 'hypothesis', 'tests')))\n"
        "import aorta.gpu_check.check_command, aorta.gpu_check.check_ranks\n"
        "print(sorted(name for name in sys.modules if name.startswith('tests.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
