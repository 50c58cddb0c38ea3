"""Records of the first AORTA: what they hold, and what they cannot know."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aorta.analysis
from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.launch_set import samples
from aorta.analysis.load.aorta_2025 import UNSEEN, read_aorta_2025
from aorta.analysis.load.interval_table import KIND_CODE, NULL, IntervalClass, Trace
from aorta.analysis.metrics import RECORDED_2025
from aorta.analysis.report.report_command import overlap_report
from aorta.errors import InputError
from aorta.records.schema import AuxRange, DeviceSample
from tests.analysis.builders import strict_json


def a_range(stream: str, start: float, end: float, tag: str = "t", **metadata: str) -> dict[str, Any]:
    return {
        "stream": stream,
        "tag": tag,
        "start_ms": start,
        "end_ms": end,
        "duration_ms": end - start,
        "metadata": metadata,
    }


def line(step: int, total: float, ranges: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "rank": 0,
        "world_size": 2,
        "epoch": 0,
        "step": step,
        "global_step": step,
        "loss": 1.5,
        "grad_norm": None,
        "lr": 0.1,
        "profile": {
            "index": step,
            "total_ms": total,
            "ranges": ranges,
            "markers": [],
            "overlap": {"per_stream_ms": {}},
        },
    } | more


FIRST = [
    a_range("compute", 1.0, 9.0, "forward"),
    a_range("allreduce", 8.0, 8.5, "all_reduce", function="all_reduce"),
    a_range("aux", 0.5, 0.75, "all_gather", function="all_gather_into_tensor"),
    a_range("aux", 9.0, 10.0, "optimizer"),
]


def read(*lines: dict[str, Any], tail: bytes = b"") -> Trace:
    text = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    return read_aorta_2025(io.BytesIO(text + tail), "rank_00_metrics.jsonl")


def test_ranges_become_rows_and_iterations_are_laid_end_to_end() -> None:
    trace = read(line(0, 10.0, FIRST), line(1, 5.0, [a_range("reducescatter", 1.0, 2.0)]))
    table = trace.intervals
    assert trace.windows.step.tolist() == [0, 1]
    assert trace.windows.start_ns.tolist() == [0, 10_000_000]
    assert trace.windows.end_ns.tolist() == [10_000_000, 15_000_000]
    assert table.start_ns.tolist() == [1_000_000, 8_000_000, 500_000, 9_000_000, 11_000_000]
    assert table.end_ns.tolist() == [9_000_000, 8_500_000, 750_000, 10_000_000, 12_000_000]
    assert table.step.tolist() == [0, 0, 0, 0, 1]
    assert (trace.ranks, trace.world_size, trace.clock, trace.format) == ((0,), 2, "unknown", "aorta-2025")


def test_w8_all_gathers_are_communication_although_their_stream_was_aux() -> None:
    table = read(line(0, 10.0, FIRST)).intervals
    assert table.cls.tolist() == [IntervalClass.COMPUTE, IntervalClass.COMM, IntervalClass.COMM, IntervalClass.AUX]
    assert table.kind.tolist() == [NULL, KIND_CODE["allreduce"], KIND_CODE["allgather"], NULL]


def test_what_it_cannot_know_is_said() -> None:
    trace = read(line(0, 10.0, FIRST))
    assert trace.unseen == UNSEEN
    assert not trace.copies_observed
    assert any("upper bound" in note for note in trace.notes)
    assert any("laid end to end" in note for note in trace.notes)


def test_no_number_rests_on_the_times_of_launches(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [json.dumps({**line(step, 20.0, FIRST), "rank": rank}) + "\n" for step in range(8)]
        (tmp_path / f"rank_{rank:02d}_metrics.jsonl").write_text("".join(lines))
    assert overlap_report([str(tmp_path), "--output", str(tmp_path / "out"), "--no-html"]) == 0
    ((_, entry),) = strict_json(tmp_path / "out" / "summary.json")["datasets"].items()
    for cost in entry["traces"]["costs"]:
        unknown = {name for name, value in cost.items() if value is None}
        assert unknown == set(cost["reasons"]) == {
            *("time_ms", "hidden_ms", "exposed_ms", "overlap_ratio", "transfer_ms", "algbw_gb_per_s", "busbw_gb_per_s")
        }  # fmt: skip
        assert set(cost["reasons"].values()) == {UNSEEN}
        assert cost["count"] == 16
    assert entry["traces"]["slowdowns"] == []
    for group in entry["collectives"]:
        assert {
            name for name, value in group.items() if isinstance(value, dict) and value.get("median") is not None
        } == set()
        assert group["end_sources"] == {"launch": 16}
    assert entry["metrics"]["exposed_comm_ms"]["median"] is None


def test_a_last_line_cut_off_by_a_kill_is_left_out_and_said() -> None:
    trace = read(line(0, 10.0, FIRST), tail=b'{"rank": 0, "prof')
    assert len(trace.windows) == 1
    assert "rank_00_metrics.jsonl:2: cut off in mid-line; ignored" in trace.notes


def test_ranges_beyond_their_iteration_are_cut_and_counted() -> None:
    trace = read(line(0, 10.0, [a_range("compute", -1.0, 11.0)]), line(1, 5.0, []))
    assert trace.intervals.end_ns.tolist() == [10_000_000]
    assert any("1 range(s) reach beyond their iteration" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"rank": "0"}, r"rank_00_metrics\.jsonl:2: .*Expected `int`, got `str` - at `\$\.rank`"),
        ({"profile": {"total_ms": 1.0}}, "missing required field `ranges`"),
        ({"profile": {"total_ms": -1.0, "ranges": []}}, r"at `\$\.profile\.total_ms`"),
        ({"profile": {"total_ms": 1e300, "ranges": []}}, r"at `\$\.profile\.total_ms`"),
        ({"rank": 1}, "lines of 2 ranks; one file holds one rank"),
    ],
)
def test_broken_lines_are_refused_with_their_place(broken: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(line(0, 10.0, FIRST), line(1, 10.0, []) | broken)


def test_nan_is_no_number() -> None:
    with pytest.raises(InputError, match=r"rank_00_metrics\.jsonl:1: not an iteration of the first AORTA"):
        read(line(0, float("nan"), []))


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(InputError, match="no iterations in it"):
        read()


def test_a_repeated_iteration_is_left_out_and_said() -> None:
    again = read(line(0, 10.0, FIRST), line(1, 12.0, FIRST), line(1, 99.0, FIRST))
    once = read(line(0, 10.0, FIRST), line(1, 12.0, FIRST))
    assert again.intervals.end_ns.tolist() == once.intervals.end_ns.tolist()
    assert again.windows.end_ns.tolist() == once.windows.end_ns.tolist()
    assert any("1 iteration(s) repeat a global step" in note for note in again.notes)


# --- everything that a line says is read, and shown ---------------------------------------------------------------


def smi(*watts: float) -> str:
    """What rocm-smi printed, one card after another."""
    cards = "".join(
        f"GPU[{card}]\t\t: Temperature (Sensor junction) (C): 5{card}.0\n"
        f"GPU[{card}]\t\t: sclk clock level: 1: (17{card}0Mhz)\n"
        f"GPU[{card}]\t\t: Average Graphics Package Power (W): {power}\n"
        f"GPU[{card}]\t\t: GPU use (%): 9{card}\n"
        for card, power in enumerate(watts)
    )
    return f"=== ROCm System Management Interface ===\n{cards}=== End of ROCm SMI Log ===\n"


OVERLAP = {"per_stream_ms": {"compute": 8.0, "allreduce": 0.5}, "overlap_ms": {"compute_comm": 2.0, "idle": 0.5}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks of one node with two cards: four iterations, of which the last names no overlap and no rocm-smi."""
    for rank in range(2):
        lines = []
        for number in range(4):
            more = {"rank": rank, "epoch": number // 2, "step": number % 2, "loss": 4.0 - number, "lr": 0.1 * number}
            more["grad_norm"] = 1.0 + rank
            if number < 3:
                more |= {"rocm_smi_output": smi(100.0 + number, 200.0 + number), "rocm_smi_exit_code": 0}
            each = line(number, 10.0, FIRST) | more
            each["profile"]["overlap"] = OVERLAP if number < 3 else {}
            lines.append(json.dumps(each) + "\n")
        (tmp_path / f"rank_0{rank}_metrics.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.mark.spec("D4")
def test_steps_have_loss_learning_rate_and_gradient_norm(folder: Path) -> None:
    frame = aorta.analysis.steps(folder)
    one = frame[frame["rank"] == 1]
    assert one["loss"].tolist() == [4.0, 3.0, 2.0, 1.0]
    assert one["lr"].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert one["grad_norm"].tolist() == [2.0] * 4
    assert one["epoch"].tolist() == [0, 0, 1, 1]
    assert one["step"].tolist() == [0, 1, 0, 1]


@pytest.mark.spec("D27")
def test_what_rocm_smi_printed_is_parsed_and_joined_to_its_iteration(folder: Path) -> None:
    frame = aorta.analysis.steps(folder)
    for rank, base in ((0, 100.0), (1, 200.0)):
        mine = frame[frame["rank"] == rank]
        assert mine["device_power_w"].tolist()[:3] == [base, base + 1, base + 2]
        assert mine["device_temp_c"].tolist()[:3] == [50.0 + rank] * 3
        assert mine["device_sclk_mhz"].tolist()[:3] == [1700.0 + 10 * rank] * 3
        assert mine["device_util_pct"].tolist()[:3] == [90.0 + rank] * 3
    assert len(aorta.analysis.device_samples(folder)) == 6


def test_auxiliary_work_keeps_its_names(folder: Path) -> None:
    run = aorta.analysis.load_run(folder)
    assert run.ranks[0].details.step(1).aux == [AuxRange("optimizer", 9_000_000, 10_000_000)]
    bare = read(line(0, 10.0, [a_range("compute", 1.0, 2.0)]))
    assert bare.aux_observed  # its stream was recorded: 0 ms of it, not unknown


def test_the_report_shows_all_of_it_and_compares_the_old_ratio_with_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--log-dir", str(folder), "--label", "x", "--log-dir", str(folder), "--label", "y", "--no-html"]
    words += ["--reference", "x", "--candidate", "y", "--all", "--output", str(tmp_path / "out")]
    assert overlap_report(words) == 0
    summary = strict_json(tmp_path / "out" / "summary.json")
    entry = summary["datasets"]["x"]
    assert entry["mean_loss"] == 2.5
    assert entry["devices"]["ranks"]["1"]["power_w"]["median"] == 201.0
    ratio = entry["metrics"][RECORDED_2025]
    assert (ratio["median"], ratio["nulls"]) == (0.25, 2)
    assert "no overlap" in next(iter(ratio["null_reasons"]))
    assert {name for row in entry["collectives"] for name in row["end_sources"]} == {"launch"}
    assert entry["overlap_ratio"] is None  # never in place of the measured one
    assert "launch-timed" in summary["metrics"][RECORDED_2025]["definition"]
    assert RECORDED_2025 not in summary["comparison"]["metrics"]
    assert f"{RECORDED_2025} is the ratio that the first AORTA wrote" in " ".join(capsys.readouterr().out.split())
    assert {"x_devices.png", "x_timeline.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    with pytest.raises(SystemExit, match="2"):
        overlap_report([*words, "--fail-on", f"{RECORDED_2025}<0"])


def test_the_old_ratio_is_in_no_verdict_of_launch_sets(folder: Path) -> None:
    assert RECORDED_2025 not in samples(LabelledRun("x", aorta.analysis.load_run(folder)))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rocm_smi_error": "rocm-smi not available"}, "rocm-smi not available"),
        ({"rocm_smi_output": "", "rocm_smi_exit_code": 2, "rocm_smi_stderr": "no driver"}, "ended with 2: no driver"),
        ({"rocm_smi_output": "nothing"}, "no card in its output"),
        ({"rocm_smi_output": smi(1.0, 2.0, 3.0)}, "cannot tell which of 3 cards"),
        ({"rocm_smi_output": "GPU[0] : Average Graphics Package Power (W): " + "9" * 400}, "none of its values"),
    ],
)
def test_a_sample_that_cannot_be_used_says_why(said: dict[str, Any], words: str) -> None:
    stated = read(line(0, 10.0, FIRST, **said)).stated
    assert stated is not None
    ((sample, reason),) = stated.samples
    assert sample == DeviceSample(0, 10_000_000, *[None] * 7)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    "overlap", [None, {}, {"per_stream_ms": {"compute": 0.0}, "overlap_ms": {"compute_comm": 1.0}}, {"overlap_ms": {}}]
)
def test_no_ratio_where_the_iteration_has_none(overlap: dict[str, Any] | None) -> None:
    each = line(0, 10.0, FIRST)
    each["profile"]["overlap"] = overlap
    stated = read(each).stated
    assert stated is not None
    assert np.isnan(stated.metrics[RECORDED_2025]).all()
