"""The table and the reading of kernels, with stand-in data: these run without a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import check
from tests.gpu.kernels import Window, matched, pooled_ratio, windows
from tests.gpu.table import Row, duration_row, failed, ratio_row, render

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


def test_kernels_are_told_apart_by_category_name_and_device() -> None:
    first, second = windows(TRACE, STEPS, device=0)
    assert first.comm == [(BASE + 10_000, BASE + 30_000)]
    assert len(first.compute) == 2
    assert (first.lengths_ns(), second.lengths_ns()) == ((20_000, 10_000), (10_000, 0))
    assert pooled_ratio([first, second]) == pytest.approx(1 / 3)
    assert (first.host_waits, second.host_waits) == (0, 1)


def test_no_communication_is_no_ratio() -> None:
    assert pooled_ratio([Window([], [(0, 1)], 0)]) is None


def test_durations_are_matched_in_order_or_not_at_all() -> None:
    seen = windows(TRACE, STEPS, device=0)
    assert matched([[20_500], [9_000]], seen) == [(20_500, 20_000), (9_000, 10_000)]
    assert matched([[20_500], []], seen) is None


@pytest.mark.parametrize(
    ("own", "kernels", "passed"), [(0.5, 0.515, True), (0.5, 0.53, False), (None, 0.5, None), (0.5, None, None)]
)
def test_ratios_agree_within_two_hundredths(own: float | None, kernels: float | None, passed: bool | None) -> None:
    assert ratio_row("ddp", own, kernels).passed is passed


@pytest.mark.parametrize(
    ("pairs", "passed"),
    [
        ([(1_015_000, 1_000_000)], True),
        ([(1_025_000, 1_000_000)], False),
        ([(19_000, 10_000)], True),
        ([(21_000, 10_000)], False),
        ([], None),
        (None, None),
    ],
)
def test_durations_agree_within_the_larger_bound(pairs: list[tuple[int, int]] | None, passed: bool | None) -> None:
    assert duration_row("ddp", pairs).passed is passed


def test_the_table_counts_and_aligns() -> None:
    rows = [
        Row("ddp", "race", "right", "right", True),
        Row("fsdp", "no sync", "2 waits", "0", False),
        Row("ddp", "W1", "1 us", "", None),
    ]
    text = render(rows).splitlines()
    assert text[0].split() == ["case", "what", "found", "allowed"]
    assert text[1].index("right") == text[2].index("2 waits")
    assert text[2].endswith("FAILED")
    assert text[-1] == "1 of 2 checks passed, 1 for information"


def test_a_failure_or_an_empty_table_fails() -> None:
    good, info = Row("a", "b", "c", "d", True), Row("a", "b", "c", "d", None)
    assert not failed([good, info])
    assert failed([good, Row("a", "b", "c", "d", False)])
    assert failed([info])
    assert failed([])


def test_without_a_device_the_check_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert check.main([]) == 1
    assert capsys.readouterr().err.strip() == check.NO_DEVICE
