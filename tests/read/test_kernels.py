"""Kernels by name, matrix products by shape, launch gaps and hardware counters: hand-made traces with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from aorta.errors import InputError
from aorta.read.traces import tables as trace_tables
from aorta.read.traces.interval_table import NULL, Gemm
from aorta.read.traces.kernels import (
    FEWEST,
    NO_COUNTERS,
    NO_PRODUCTS,
    NO_STREAMS,
    StreamGapsEntry,
    by_name,
    by_shape,
    counter_means,
    entries,
    gemm_rates,
    kernel_facts,
    kernel_totals,
    ratio_of_means,
    slowdowns,
    stream_gaps,
)
from aorta.read.traces.kineto.events import gemm_of
from aorta.read.traces.load import load_traces
from aorta.read.traces.nsys import NSYS
from aorta.read.traces.rocprof.csv_files import ROCPROF_CSV
from aorta.read.traces.rocprof.trace import SERIALISED
from aorta.timeline.arrays import covered_ns, interval_array, merge
from tests.read import rocprof_files as rocprof
from tests.read import test_rocprof
from tests.read.kineto_files import ALLREDUCE, event, kernel, read
from tests.read.nsys_files import write_nsys
from tests.read.tables import COMM, COMPUTE, COPY, UNKNOWN, read_with, row, trace
from tests.strategies import bases, interval_lists

MS = 1_000_000


def product(name: str, ident: int, dims: list[Any] | None, at: float = 0, lasts: float = 5) -> dict[str, Any]:
    given = {} if dims is None else {"Input Dims": dims, "Input type": ["float"] + ["c10::BFloat16"] * 3}
    return event("cpu_op", name, at, lasts, 1, 1, **{"External id": ident, **given})


def launch(correlation: int, at: float) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", at, 1, 1, 1, correlation=correlation)


def test_kernels_are_summed_by_name_on_each_device_with_their_share_of_its_kernel_time() -> None:
    rows = [
        *(row(COMPUTE, start * MS, (start + length) * MS, name="gemm") for start, length in ((0, 1), (10, 3))),
        row(COMM, 2 * MS, 10 * MS, name="nccl", kind="allreduce"),
        row(COPY, 20 * MS, 24 * MS, name="memcpy"),
        row(UNKNOWN, 30 * MS, 46 * MS, name=""),
        row(COMPUTE, 0, 5 * MS, name="gemm", device=1),
    ]
    totals = kernel_totals(trace(rows))
    assert [each.name for each in totals] == ["", "nccl", "gemm", "memcpy", "gemm"]
    found = {(each.device, each.name): each for each in totals}
    told = found[0, "gemm"]
    assert (told.rank, told.cls, told.count, told.total_ms, told.mean_ms) == (0, "compute", 2, 4.0, 2.0)
    assert told.std_ms == pytest.approx(2**0.5)
    assert (told.min_ms, told.max_ms, told.share) == (1.0, 3.0, 0.125)
    assert (found[0, "nccl"].cls, found[0, "nccl"].share, found[0, "nccl"].std_ms) == ("comm", 0.25, None)
    assert (found[0, "memcpy"].cls, found[0, "memcpy"].share) == ("copy", 0.125)
    assert (found[0, ""].cls, found[0, ""].total_ms, found[0, ""].share) == ("unknown", 16.0, 0.5)
    assert (found[1, "gemm"].count, found[1, "gemm"].share) == (1, 1.0)


def test_all_devices_together_are_what_one_device_with_all_kernels_would_be() -> None:
    generator = np.random.default_rng(5)
    apart, together = [], []
    for device in range(3):
        for at, length in enumerate(generator.integers(1, 1000, 7 + device).tolist()):
            for device_told, rows in ((device, apart), (0, together)):
                rows.append(row(COMPUTE, 10_000 * at, 10_000 * at + length, name=f"k{at % 2}", device=device_told))
    totals, expected = kernel_totals(trace(apart)), kernel_totals(trace(together))
    found = by_name(totals, sum(row.total_ms for row in totals))
    for one, other in zip(found, expected, strict=True):
        assert (one.rank, one.device, one.name, one.count) == (None, None, other.name, other.count)
        for name in ("total_ms", "mean_ms", "std_ms", "min_ms", "max_ms", "share"):
            assert getattr(one, name) == pytest.approx(getattr(other, name))


@pytest.mark.parametrize(
    ("operator", "dims", "expected"),
    [
        ("aten::mm", "[[8, 16], [16, 4]]", (1, 8, 4, 16)),
        ("aten::addmm", "[[4], [8, 16], [16, 4], [], []]", (1, 8, 4, 16)),
        ("aten::bmm", "[[3, 8, 16], [3, 16, 4]]", (3, 8, 4, 16)),
        ("aten::baddbmm", "[[3, 8, 4], [3, 8, 16], [3, 16, 4], [], []]", (3, 8, 4, 16)),
        ("aten::mm", "[[8, 16], [8, 4]]", None),
        ("aten::mm", "[[8, 16]]", None),
        ("aten::mm", "[[8, 0], [0, 4]]", None),
        ("aten::mm", '[[8, "16"], ["16", 4]]', None),
        ("aten::mm", "[[8, true], [true, 4]]", None),
        ("aten::mm", f"[[8, {10**30}], [{10**30}, 4]]", None),
        ("aten::mm", "[[[8, 16]], [[16, 4]]]", None),
        ("aten::bmm", "[[3, 8, 16], [2, 16, 4]]", None),
        ("aten::addmm", "null", None),
        ("aten::mm", "7", None),
    ],
)
def test_the_shape_of_a_product_is_that_of_its_two_factors_or_not_known(
    operator: str, dims: str, expected: tuple[int, ...] | None
) -> None:
    found = gemm_of(operator, dims.encode(), b'["c10::BFloat16", "c10::BFloat16"]')
    assert found == (None if expected is None else Gemm(operator, *expected, "bfloat16"))


def test_a_product_lasts_as_long_as_the_kernels_of_its_operator_and_its_rate_follows_from_its_shape() -> None:
    shape = [[64, 128], [128, 256]]
    found, missing = gemm_rates(
        read(
            [
                product("aten::mm", 11, shape),
                product("aten::mm", 12, shape),
                product("aten::addmm", 13, [[256], *shape]),
                product("aten::bmm", 14, None),
                product("aten::mm", 15, shape),  # its kernel ran after the profiler had stopped
                kernel("gemm", 0, 300, External_id=11),
                kernel("splitKreduce", 300, 100, External_id=11),
                kernel("gemm", 400, 600, External_id=12),
                kernel("gemm", 1000, 250, External_id=13),
                kernel("gemm", 2000, 900, External_id=14),
            ]
        )
    )
    plain, added = found
    assert (plain.operator, plain.batch, plain.m, plain.n, plain.k) == ("aten::mm", 1, 64, 256, 128)
    assert (plain.dtype, plain.count, plain.total_ms, plain.mean_ms) == ("float32", 2, 1.0, 0.5)
    assert plain.std_ms == pytest.approx(0.1 * 2**0.5)
    assert plain.tflops == pytest.approx(2 * (2 * 64 * 256 * 128) / 1e-3 / 1e12)
    assert (added.operator, added.dtype, added.count, added.std_ms) == ("aten::addmm", "bfloat16", 1, None)
    assert added.tflops == pytest.approx((2 * 64 * 256 * 128) / 250e-6 / 1e12)
    assert missing == (
        "1 without Input Dims of two factors: record with record_shapes=True; "
        "1 of known shape without a kernel in the trace"
    )
    (pooled, _) = by_shape([*found, *found])
    assert (pooled.rank, pooled.count, pooled.total_ms) == (None, 4, 2.0)
    assert pooled.tflops == pytest.approx(plain.tflops)


def test_without_products_or_shapes_there_are_no_rows_and_a_reason() -> None:
    assert gemm_rates(read([kernel("gemm", 0, 5)])) == ([], NO_PRODUCTS)
    told = "1 without Input Dims of two factors: record with record_shapes=True"
    unshaped = [product("aten::mm", 5, None), kernel("gemm", 0, 5)]
    assert gemm_rates(read(unshaped)) == ([], told)
    assert gemm_rates(trace([row(COMPUTE, 0, 5)], format="nsys"))[1] == (
        "unknown: nsys does not write shapes: record with torch.profiler and record_shapes=True"
    )


def test_products_of_a_real_trace_have_the_operations_that_torch_counts(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    first, second, batched = torch.ones(16, 32), torch.ones(32, 8), torch.ones(3, 16, 32)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as profiler:
        for _ in range(3):
            torch.mm(first, second)
            torch.addmm(torch.ones(8), first, second)
            torch.bmm(batched, torch.ones(3, 32, 8))
            torch.baddbmm(torch.ones(3, 16, 8), batched, torch.ones(3, 32, 8))
    profiler.export_chrome_trace(str(tmp_path / "rank0.json"))
    kernels = load_traces(str(tmp_path)).traces.kernels
    found = {row.operator: row for row in kernels.gemms}
    counted = {each.key: each.flops for each in profiler.key_averages() if each.flops}
    assert {name: 2 * each.batch * each.m * each.n * each.k * each.count for name, each in found.items()} == {
        name: counted[name] for name in found
    }
    assert found.keys() == {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
    assert all(row.tflops > 0 and row.rank == 0 for row in found.values())
    assert kernels.reasons == {"gaps": [NO_STREAMS], "counters": [NO_COUNTERS]}


def test_a_gap_is_launch_bound_where_the_call_began_after_the_kernel_before_had_ended() -> None:
    (found, other), reason = stream_gaps(
        read(
            [
                kernel("a", 0, 10, correlation=1),
                kernel("b", 12, 8, correlation=2),
                kernel("c", 30, 10, correlation=3),
                kernel("d", 41, 9, correlation=4),
                kernel("e", 45, 15, correlation=5),  # beside the one before: no gap
                kernel("other stream", 0, 1, stream=9, correlation=6),
                kernel("other stream", 3, 1, stream=9),
                launch(1, -5),
                launch(2, 5),  # while a ran: the gap of 2 us is not the host's
                launch(3, 25),  # after b had ended: 10 us
                launch(3, 26),
                launch(5, 44),
            ]
        )
    )
    assert reason is None
    assert found == StreamGapsEntry(0, 0, 7, 5, 0.047, 0.047, 0.0, 3, 0.013, 2, 1, 0.010, 0.0, None)
    assert other == StreamGapsEntry(
        0, 0, 9, 2, 0.002, 0.002, 0.0, 1, 0.002, 0, None, None, None, "no launch of its kernels is known"
    )


@pytest.mark.parametrize("category", ["cuda_driver", "Runtime", "hip_runtime"])
@pytest.mark.parametrize("from_1970", [False, True])
def test_launches_are_found_in_every_category_and_beyond_the_digits_of_a_float(category: str, from_1970: bool) -> None:
    base = 1_790_857_026_000_000 if from_1970 else 0
    events = [
        kernel("a", base + 1, 10, correlation=1),
        kernel("b", base + 13, 10, correlation=2),
        {**launch(2, base + 12), "cat": category},
    ]
    (found,), _ = stream_gaps(read(events, baseTimeNanoseconds=None))
    assert (found.gaps, found.gap_ms, found.launch_bound, found.launch_bound_ms) == (1, 0.002, 1, 0.002)


@pytest.mark.parametrize("arguments", ["7", '"text"', "[1]", '{"correlation": {}}', '{"correlation": -4}', "{}"])
def test_calls_and_products_with_odd_arguments_launch_nothing(arguments: str) -> None:
    from tests.read.kineto_files import read_text

    odd = [
        f'{{"ph": "X", "cat": "{cat}", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "args": {arguments}}}'
        for cat in ("cuda_runtime", "cpu_op", "kernel")
    ]
    good = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5, "dur": 1, "args": {"stream": 7}}'
    made = read_text(f'{{"schemaVersion": 1, "traceEvents": [{", ".join([*odd, good])}]}}')
    assert (made.intervals.launch_ns == NULL).all()
    assert not kernel_facts(made).gemms.rows


@pytest.mark.parametrize("source", ["json", "csv-direct", "rocpd"])
def test_every_output_of_rocprofv3_tells_what_was_launched_late(source: str, tmp_path: Path) -> None:
    first = next(each for each in stream_gaps(test_rocprof.read(source, tmp_path))[0] if each.stream == 1)
    # Before the copy 350 ns, of unknown launch; before the fill 10 ns and before the second gemm 170 ns, both late.
    assert (first.kernels, first.gaps, first.gap_ms, first.busy_ms) == (4, 3, 530e-6, 670e-6)
    assert (first.gaps_known, first.launch_bound) == (2, 2)
    assert first.launch_bound_ms == pytest.approx(180e-6)


def test_nsys_tells_what_was_launched_late(tmp_path: Path) -> None:
    made = read_with(NSYS, write_nsys(tmp_path / "n.sqlite"))
    first = next(each for each in stream_gaps(made[0])[0] if each.stream == 7)
    assert (first.gaps, first.gap_ms, first.gaps_known, first.launch_bound_ms) == (2, 550e-6, 1, 200e-6)


def with_counters(*values: tuple[int, str, str, object]) -> dict[str, bytes]:
    head = "Correlation_Id,Dispatch_Id,Agent_Id,Kernel_Name,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp"
    lines = [f'{at},{at},"Agent 5","{name}",{counter},{value},1,2' for at, name, counter, value in values]
    return {**rocprof.as_csv("direct"), "4242_counter_collection.csv": "\n".join([head, *lines]).encode()}


def test_counters_belong_to_the_kernel_of_their_dispatch_beside_what_communication_covers_of_it() -> None:
    (made,) = read_with(
        ROCPROF_CSV,
        with_counters(
            (1, rocprof.GEMM, "OccupancyPercent", 40.0),
            (4, rocprof.GEMM, "OccupancyPercent", 50.0),
            (1, rocprof.GEMM, "SQ_WAVES", 100),
            (1, rocprof.GEMM, "SQ_WAVES", 60),  # of another instance of the counter
            (2, rocprof.GENERIC, "SQ_WAVES", 7),
            (3, rocprof.GEMM, "SQ_WAVES", 9999),  # dispatch 3 is the fill: of another run
        ),
    )
    rows, reason = counter_means(made)
    assert reason is None
    found = {(each.name, each.counter): each for each in rows}
    occupancy = found[rocprof.GEMM, "OccupancyPercent"]
    assert (occupancy.count, occupancy.mean, occupancy.min, occupancy.max) == (2, 45.0, 40.0, 50.0)
    assert occupancy.comm_share == pytest.approx(200 / 600)
    waves = found[rocprof.GEMM, "SQ_WAVES"]
    assert (waves.count, waves.mean, waves.comm_share) == (1, 160.0, pytest.approx(100 / 400))
    assert found[rocprof.GENERIC, "SQ_WAVES"].comm_share is None
    assert len(found) == 3
    assert SERIALISED in made.notes
    assert any("1 values of hardware counters belong to no kernel of this trace" in note for note in made.notes)


def test_counters_of_other_kernels_are_left_out_and_none_is_a_reason() -> None:
    (strange,) = read_with(ROCPROF_CSV, with_counters((77, "k", "SQ_WAVES", 1)))
    assert counter_means(strange) == ([], "no value of a hardware counter has the dispatch id of a kernel")
    assert counter_means(trace([row(COMPUTE, 0, 5)])) == ([], NO_COUNTERS)


@pytest.mark.parametrize("value", ["inf", "much", ""])
def test_a_counter_that_is_no_finite_number_is_named_with_its_line(value: str) -> None:
    with pytest.raises(InputError, match=r"4242_counter_collection\.csv:2: counter_value is .*a finite number"):
        read_with(ROCPROF_CSV, with_counters((1, rocprof.GEMM, "SQ_WAVES", value)))


def test_a_slowdown_has_the_means_of_both_sides_and_an_interval_of_their_ratio() -> None:
    lengths = {0: (100, 200, 300, 400, 500, 600), 1_000_000: (200, 400, 600, 800, 1000, 1200)}
    rows = [
        row(COMPUTE, at + 10_000 * place, at + 10_000 * place + length)
        for at, side in lengths.items()
        for place, length in enumerate(side)
    ]
    (found,) = slowdowns(trace([*rows, row(COMM, 1_000_000, 2_000_000, kind="allreduce")]))
    assert (found.alone_mean_ms, found.overlapped_mean_ms) == (350e-6, 700e-6)
    assert found.mean_ratio == pytest.approx(2)
    # Both sides have a variance of 35,000 at a mean of 350 (in squares: 2/7), 6 kernels each: 10 degrees of freedom,
    # of which Student's t has 2.228139 at 97.5 % (tables).
    reach = 2.228139 * (2 * (35_000 / 350**2) / 6) ** 0.5
    assert found.mean_ratio_low == pytest.approx(2 * np.exp(-reach), rel=1e-6)
    assert found.mean_ratio_high == pytest.approx(2 * np.exp(reach), rel=1e-6)


def test_the_interval_contains_the_true_ratio_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(11)
    hits = 0
    for _ in range(1000):
        alone, beside = generator.normal(1e6, 1e5, 20), generator.normal(1.3e6, 2e5, 9)
        _, low, high = ratio_of_means(alone.astype(np.int64), beside.astype(np.int64))
        hits += low <= 1.3 <= high
    assert 930 <= hits <= 970


def test_kernels_that_all_last_the_same_have_a_ratio_without_width() -> None:
    same = np.full(6, 400)
    assert ratio_of_means(same, same * 2) == (2.0, 2.0, 2.0)


def test_rows_beyond_the_kept_ones_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aorta.read.traces.kernels.SHOWN_ROWS", 2)
    rows = [[row(COMPUTE, 0, 10 + at, name=f"k{at}", rank=rank) for at in range(5)] for rank in (0, 1)]
    kept = entries([kernel_facts(trace(rows[0])), kernel_facts(trace(rows[1]))])
    assert (len(kept.totals), kept.left_out) == (4, {"totals": 6})


def test_communication_between_kernels_is_no_gap_of_their_stream_but_has_one_of_its_own() -> None:
    (compute, comm), _ = stream_gaps(
        read([kernel("a", 0, 10), kernel(ALLREDUCE, 5, 20, stream=20), kernel("b", 30, 10), kernel("c", 40, 10)])
    )
    assert (compute.stream, compute.gaps, compute.gap_ms) == (7, 1, 0.020)
    assert (comm.stream, comm.kernels, comm.gaps, comm.launch_bound) == (20, 1, 0, 0)


@given(rows=interval_lists, cover=interval_lists, base=bases)
def test_covered_time_is_what_counting_nanoseconds_gives(
    rows: list[tuple[int, int]], cover: list[tuple[int, int]], base: int
) -> None:
    counted = [sum(any(low <= t < high for low, high in cover) for t in range(start, end)) for start, end in rows]
    moved = [interval_array((start + base, end + base) for start, end in each) for each in (rows, cover)]
    assert covered_ns(moved[0], merge(moved[1])).tolist() == counted


def gemms(count: int, at: int, length: int, **where: int) -> list[dict[str, object]]:
    return [row(COMPUTE, at + 1000 * each, at + 1000 * each + length, name="gemm", **where) for each in range(count)]


COVER = row(COMM, 100_000, 200_000, kind="allreduce")


@pytest.mark.parametrize(
    ("rows", "counts", "slower", "reason"),
    [
        ([*gemms(6, 0, 400), *gemms(7, 100_000, 500), COVER], (6, 7, 0), (0.25, 7 * 100e-6), None),
        (
            [*gemms(FEWEST - 1, 0, 400), *gemms(7, 100_000, 500), COVER],
            (5, 7, 0),
            None,
            "5 alone and 7 overlapped; at least 6 of each are needed",
        ),
        # [900, 1000) touches the first kernel for 100 of its 400 ns.
        (
            [*gemms(8, 600, 400), row(COMM, 900, 1000, kind="allreduce")],
            (7, 0, 1),
            None,
            "7 alone and 0 overlapped; at least 6 of each are needed",
        ),
        (
            [*gemms(12, 0, 400, device=0), row(COMM, 0, 12_000, kind="allreduce", device=1)],
            (12, 0, 0),
            None,
            "no communication on this device",
        ),
    ],
)
def test_the_median_of_covered_kernels_is_set_against_that_of_those_alone(
    rows: list[Any], counts: tuple[int, int, int], slower: tuple[float, float] | None, reason: str | None
) -> None:
    (found,) = slowdowns(trace(rows))
    assert (found.name, found.rank, found.device, found.reason) == ("gemm", 0, 0, reason)
    assert (found.alone_count, found.overlapped_count, found.partly_count) == counts
    assert found.alone_median_ms == pytest.approx(400e-6)
    assert (found.slowdown, found.excess_ms) == ((None, None) if slower is None else pytest.approx(slower))


def test_kernels_that_became_faster_stand_before_those_that_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cover = row(COMM, 100_000, 200_000, kind="allreduce")
    named = [
        {**each, "name": name}
        for name, alone, overlapped in (("slower", 400, 500), ("faster", 400, 300))
        for each in (*gemms(6, 0, alone), *gemms(6, 100_000, overlapped))
    ]
    made = trace([*named, row(COMPUTE, 0, 5, name="a"), row(COMPUTE, 0, 5, name="b"), cover])
    assert [each.name for each in slowdowns(made)] == ["slower", "faster", "a", "b"]
    monkeypatch.setattr(trace_tables, "read_unit", lambda unit: iter([made]))
    monkeypatch.setattr(trace_tables, "SHOWN_SLOWDOWNS", 2)
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    run = load_traces(str(tmp_path / "t.json"))
    assert [each.name for each in run.traces.slowdowns] == ["slower", "faster"]
    assert any("2 left out" in note for note in run.health.notes())
