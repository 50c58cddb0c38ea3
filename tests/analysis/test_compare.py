"""Candidate against reference: signs, quotients, directions, and what is not judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.compare.run_comparison import (
    changes_the_work,
    compare,
    compared_losses,
    unlike_work,
    why_ratios_alone,
)
from aorta.analysis.compare.verdict import Rules
from aorta.documents import as_json, known
from aorta.documents.comparison import Comparison, FactDifference
from aorta.read.locations import load_source
from aorta.read.record import load_run
from aorta.read.run import Run
from aorta.records.schema import Collective
from tests.analysis.builders import collective, metrics, step
from tests.analysis.run_builders import recorded

CONFIG = {"workload": {"name": "mlp", "width": 64}, "training": {"mixed_precision": "none", "seed": 1}}


def side(
    folder: Path,
    label: str,
    overlap: dict[str, float | None],
    config: dict[str, Any] = CONFIG,
    *,
    rows: Sequence[Collective] = (collective(),),
    losses: Sequence[float | None] = (1.0,),
    manifest: dict[str, Any] | None = None,
    **head: Any,
) -> LabelledRun:
    """Two ranks, a step for each loss, all of them with these collectives; `manifest`: what it has besides."""
    shared = {"overlap": overlap, "collectives": [*rows]}
    lines = [[step(rank, 2, at, loss=loss, **shared) for at, loss in enumerate(losses)] for rank in range(2)]
    whole = {"config": config, "run_id": label} | (manifest or {})
    return recorded(folder / label, lines.__getitem__, 2, run_id=label, label=label, manifest=whole, **head)


def compared(*sides: LabelledRun, **rules: Any) -> Comparison:
    reference, candidate = (aggregate(each) for each in sides)
    return compare(
        (sides[0], sides[1]),
        (reference.described, candidate.described),
        (reference.matched, candidate.matched),
        [[known(reference.pace)], [known(candidate.pace)]],
        Rules(**rules),
    )


def test_differences_quotients_and_directions(tmp_path):
    found = compared(side(tmp_path, "cuda", metrics(20, 16, 8, 6)), side(tmp_path, "new", metrics(25, 16, 8, 2)))
    assert (found.reference_overlap_ratio, found.candidate_overlap_ratio) == (0.75, 0.25)
    assert found.ratio_delta == -0.5
    ratio, exposed = found.metrics["overlap_ratio"], found.metrics["exposed_comm_ms"]
    assert (ratio.difference, ratio.quotient, ratio.judgement) == (-0.5, pytest.approx(1 / 3), "worse")
    assert (exposed.difference, exposed.quotient, exposed.judgement) == (4, 3, "worse")
    assert found.metrics["compute_ms"].judgement == "equal"
    assert found.metrics["compute_comm_ms"].judgement == "neutral"
    assert (ratio.reference.ratio_of_sums, ratio.candidate.ratio_of_sums) == (0.75, 0.25)


def test_milliseconds_are_shown_but_not_judged_across_platforms(tmp_path):
    found = compared(
        side(tmp_path, "cuda", metrics(20, 16, 8, 6), platform="cuda"),
        side(tmp_path, "rocm", metrics(25, 16, 8, 2), platform="rocm"),
    )
    window = found.metrics["window_ms"]
    assert (window.difference, window.judgement) == (5, "not judged")
    assert window.judgement_reason == "only ratios are judged across platforms"
    assert found.metrics["overlap_ratio"].judgement == "worse"
    assert found.collectives[0].transfer_ms.judgement == "not judged"


def test_milliseconds_of_unknown_platforms_are_not_judged_unless_asked_for():
    """Nothing in a trace may tell the vendor."""
    sides = [mock.Mock(**{"run.source.platform": None}) for _ in range(2)]
    assert "the platform of a side is not known" in str(why_ratios_alone(*sides, judge_milliseconds=False))
    assert why_ratios_alone(*sides, judge_milliseconds=True) is None


def test_a_null_side_is_a_null_difference_with_the_reason(tmp_path):
    found = compared(side(tmp_path, "a", metrics(20, 16, 0, 0)), side(tmp_path, "b", metrics(20, 16, 8, 6)))
    assert (found.ratio_delta, found.ratio_delta_reason) == (None, "overlap_ratio is not available for a")
    ratio = found.metrics["overlap_ratio"]
    assert (ratio.difference, ratio.quotient, ratio.judgement) == (None, None, "not judged")
    assert ratio.quotient_reason == "not available on one side"
    exposed = found.metrics["exposed_comm_ms"]
    assert (exposed.difference, exposed.quotient, exposed.quotient_reason) == (2, None, "the reference is 0")


def test_between_runs_of_different_work_differences_are_listed_and_nothing_is_judged(tmp_path):
    """Where a run writes is no difference."""
    training = {"mixed_precision": "bf16", "seed": 2, "x": 1, "output_dir": "elsewhere"}
    sides = (
        side(tmp_path, "a", metrics(20, 16, 8, 8), CONFIG | {"training": CONFIG["training"] | {"output_dir": "here"}}),
        side(
            *(tmp_path, "b", metrics(20, 16, 8, 6), {"workload": {"name": "mlp", "width": 128}, "training": training}),
            instrument_mode="observe",
        ),
    )
    found = compared(*sides)
    assert as_json(found.manifest_differences) == [
        {"key": "header.instrument_mode", "reference": "dedicated", "candidate": "observe"},
        {"key": "config.workload.width", "reference": 64, "candidate": 128},
        {"key": "config.training.mixed_precision", "reference": "none", "candidate": "bf16"},
        {"key": "config.training.seed", "reference": 1, "candidate": 2},
        {"key": "config.training.x", "reference": "(absent)", "candidate": 1},
    ]
    assert found.unlike == ["config.workload.width", "config.training.mixed_precision"]
    assert any("different instrument modes: " in warning for warning in found.warnings)
    assert {entry.judgement for entry in found.metrics.values()} == {"not judged"}
    ratio = found.metrics["overlap_ratio"]
    assert ratio.difference == pytest.approx(-0.25)
    assert ratio.judgement_reason.startswith("the runs did not do the same work: config.workload.width")
    assert "docs/" not in found.verdict_reason  # a wheel has no docs
    allowed = compared(*sides, allow_unlike=("all",))
    assert (allowed.unlike, allowed.metrics["overlap_ratio"].judgement) == ([], "worse")


@pytest.mark.parametrize(
    ("candidate", "said"),
    [("torch_profiler/rank0", "no verdict from traces"), ("", "no verdict from traces"), (None, "one launch per side")],
)
def test_one_run_or_trace_a_side_has_differences_and_no_verdict(candidate, said):
    sample = Path(__file__).parents[1] / "samples" / "two_gloo_ranks"
    reference = sample / "torch_profiler" / "rank0" if candidate is not None else sample
    sides = [LabelledRun(str(at), load_source(reference if at == 0 else sample / (candidate or ""))) for at in range(2)]
    found = compared(*sides)
    assert (found.verdict, found.verdict_reason.startswith(said)) == ("inconclusive", True)
    assert found.metrics["overlap_ratio"].difference is not None


def test_collectives_that_were_timed_in_different_ways_are_warned_of(tmp_path):
    def timed(label: str, *taps: str) -> LabelledRun:
        topology = [{"rank": 0, "interceptor": tap} for tap in taps]
        return side(tmp_path, label, metrics(20, 16, 8, 8), manifest={"topology": topology})

    native = timed("a", "native", "native")
    python = timed("b", "native", "python: not built")
    found = compared(native, python)
    assert as_json(found.manifest_differences) == [
        {"key": "config.instrument.interceptor", "reference": "native", "candidate": "native, python"}
    ]
    assert any("timed by native in the reference" in warning for warning in found.warnings)
    assert not any("timed by" in warning for warning in compared(native, timed("c", "native")).warnings)
    assert not any("timed by" in w for w in compared(native, side(tmp_path, "d", metrics(20, 16, 8, 8))).warnings)


OLD, NEW = ({"version": "2.27.3", "path": "/x/libnccl.so.2", "sha256": each * 32} for each in ("0a", "0b"))


def loaded(
    folder: Path, label: str, library: dict[str, Any] | None, *losses: float | None, **environment: str
) -> LabelledRun:
    """A run that recorded its library, its variables and a loss a step."""
    manifest = {"environment": environment, "collective_library": library}
    return side(folder, label, metrics(20, 16, 8, 8), losses=losses, manifest=manifest)


def test_two_builds_of_one_version_are_a_difference_and_so_are_variables(tmp_path):
    sides = loaded(tmp_path, "a", OLD, 1.0), loaded(tmp_path, "b", NEW, 1.0, LD_PRELOAD="/y/libnccl.so.2")
    found = compared(*sides)
    assert [tuple(each.values()) for each in as_json(found.manifest_differences)] == [
        ("collective_library", "2.27.3 (sha256 0a0a0a0a0a0a)", "2.27.3 (sha256 0b0b0b0b0b0b)"),
        ("environment.LD_PRELOAD", "(absent)", "/y/libnccl.so.2"),
    ]
    assert not any("both sides loaded" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("library", "variable", "value", "warned"),
    [
        (
            OLD,
            "LD_PRELOAD",
            "/y/libjemalloc.so:/y/librccl.so.1.0",
            "the same NCCL or RCCL, 2.27.3 (sha256 0a0a0a0a0a0a)",
        ),
        (None, "LD_PRELOAD", "/y/libnccl.so.2", "no NCCL or RCCL"),
        (OLD, "LD_PRELOAD", "/y/libjemalloc.so /nccl/libnccl-net.so", None),
        (OLD, "LD_LIBRARY_PATH", "/y", "the same NCCL or RCCL"),
        (None, "LD_LIBRARY_PATH", "/y", None),
    ],
)
def test_a_swap_that_did_not_happen_is_warned_of(tmp_path, library, variable, value, warned):
    sides = loaded(tmp_path, "a", library, 1.0), loaded(tmp_path, "b", library, 1.0, **{variable: value})
    said = [warning for warning in compared(*sides).warnings if "both sides loaded" in warning]
    assert len(said) == (warned is not None)
    assert warned is None or (f"{variable} is '' in the reference" in said[0] and warned in said[0])


@pytest.mark.parametrize(
    ("before", "after", "largest", "sentence"),
    [
        ([2.0, 1.5], [2.0, 1.5, 9.0], None, "bit-equal in all 4 rank-steps"),
        ([2.0, 1.5, 1.0], [2.0, 1.25, 1.125], -0.25, "differ in 4 of 6 rank-steps, most by 0.25, 1.5 -> 1.25 (rank 0"),
    ],
)
def test_losses_are_compared_to_the_last_bit(tmp_path, before, after, largest, sentence):
    found = compared_losses(loaded(tmp_path, "a", OLD, *before).run, loaded(tmp_path, "b", NEW, *after).run)
    assert found is not None
    assert found.largest == largest
    assert found.sentence.startswith(sentence)


def test_without_a_loss_on_both_sides_none_is_compared(tmp_path):
    silent = loaded(tmp_path, "a", OLD, None)
    assert compared_losses(silent.run, loaded(tmp_path, "b", OLD, 1.0).run) is None


def test_a_run_against_itself_and_a_lost_manifest_are_warned_of(tmp_path):
    one = side(tmp_path, "a", metrics(20, 16, 8, 8))
    found = compared(one, one)
    assert any("both sides are the same run 'a'" in warning for warning in found.warnings)
    (tmp_path / "a" / "run.json").unlink()
    found = compared(one, LabelledRun("b", load_run(tmp_path / "a")))
    assert any("the candidate has no manifest" in warning for warning in found.warnings)
    assert found.manifest_differences == []


def test_collectives_are_compared_with_those_of_the_same_size(tmp_path):
    def transferred(label: str, *transfers_ms: int) -> LabelledRun:
        rows = [
            collective(seq=seq, start_ms=0, end_ms=transfer_ms, bytes=1000 * (seq + 1))
            for seq, transfer_ms in enumerate(transfers_ms)
        ]
        return side(tmp_path, label, metrics(20, 16, 8, 6), rows=rows)

    found = compared(transferred("a", 1, 4), transferred("b", 2, 3)).collectives
    assert [(row.bytes, row.transfer_ms.difference) for row in found] == [(1000, 1), (2000, -1)]


def test_a_side_without_steps_is_compared_as_null(tmp_path):
    empty = recorded(tmp_path / "b", lambda rank: [], run_id="b")
    found = compared(side(tmp_path, "a", metrics(20, 16, 8, 8)), empty)
    assert found.ratio_delta is None
    assert found.metrics["window_ms"].judgement_reason == "candidate: no step is used"
    assert found.collectives_on_one_side == {"reference": 1, "candidate": 0}


def test_a_world_size_that_a_trace_does_not_say_is_no_other_work():
    assert changes_the_work(FactDifference("header.world_size", 2, 4))
    assert not changes_the_work(FactDifference("header.world_size", 2, None))


def program(folder: Path, label: str, *rows: Collective, workload: str | None = None, parallel: str = "ddp") -> Run:
    """A recorded program of one's own: its configuration does not say what it computes."""
    config = {"workload": workload and {"name": workload}}
    return side(folder, label, metrics(20, 16, 8, 6), config, rows=rows, losses=[1.0] * 3, parallel=parallel).run


BUCKETS = [collective(seq=seq, bytes=2_000_000) for seq in range(2)]
HALVES = [collective(seq=seq, bytes=500_000, dtype="bfloat16") for seq in range(4)]


@pytest.mark.parametrize(
    ("collectives", "changes", "unlike"),
    [
        (BUCKETS, {}, False),
        (HALVES, {}, False),  # the same values in other buckets and of another type
        ([*BUCKETS, collective(seq=2, bytes=4)], {}, False),  # a loss besides
        ([*BUCKETS, collective("allgather", seq=2, bytes=2_000_000)], {}, False),  # nothing is reduced by it
        (BUCKETS[:1], {}, True),
        (BUCKETS[:1], {"parallel": "fsdp"}, False),  # another strategy
        (BUCKETS[:1], {"workload": "mlp"}, False),  # its configuration says what was computed
        ([*BUCKETS, *HALVES], {}, True),
        ([], {}, False),  # nothing tells
    ],
)
def test_programs_that_reduce_other_values_a_step_did_other_work(tmp_path, collectives, changes, unlike):
    said = unlike_work(program(tmp_path, "a", *BUCKETS), program(tmp_path, "b", *collectives, **changes))
    assert (said is not None) == unlike
    assert said is None or "reduces 1000000 values over ranks in the reference" in said
