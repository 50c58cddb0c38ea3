"""`workload=copy_overlap` reads back the bandwidths and lengths that the simulated device was given."""

from __future__ import annotations

import pytest
import torch

from aorta.config.schema import CopyOverlap
from aorta.runner.copy_overlap import measured, result_lines
from tests.simulated import device
from tests.simulated.programs import needs_device

pytestmark = pytest.mark.thorough

MM_NS = 40_000
NS_PER_KIB = {"h2d": 100.0, "d2h": 50.0, "d2d": 10.0}


@pytest.mark.simulated
@needs_device
def test_bandwidths_and_lengths_are_those_of_the_device() -> None:
    torch.zeros(1, device="cuda")
    device.defaults()
    device.costs(launch_ns=3_000, event_ns=500)  # a host slower than short copies must not show
    device.lengths(**{f"copy_{way}": (0, each) for way, each in NS_PER_KIB.items()})
    device.lengths(elementwise=(0, 20.0), operators={"aten::mm": (MM_NS, 0.0)})
    settings = CopyOverlap("copy_overlap", [65_536, 1_048_576], matrix_size=8, multiplications=5, repeats=3)
    results = measured(settings, torch.device("cuda", 0))
    assert [one.size_bytes for one in results] == [65_536, 1_048_576]
    for size in results:
        by_way = {(one.way, one.by): one for one in size.ways}
        rates = NS_PER_KIB | {"p2p": NS_PER_KIB["d2d"]}
        for (way, by), one in by_way.items():
            ns_per_kib = 20.0 if by == "kernel" else rates[way]
            assert one.alone_gb_per_s == pytest.approx(1024 / ns_per_kib, rel=0.02), (way, by)
            assert one.together_gb_per_s == pytest.approx(1024 / ns_per_kib, rel=0.02), (way, by)
            assert one.compute_alone_ms == pytest.approx(5 * MM_NS / 1e6, rel=0.001)
            assert one.compute_slowdown == pytest.approx(0, abs=0.001)  # this device's streams do not contend
            assert one.overlap_efficiency == pytest.approx(1, abs=0.001)
            assert one.copies == max(1, -(-5 * MM_NS // round(size.size_bytes / 1024 * ns_per_kib)))
        assert by_way.keys() >= {("d2d", "kernel"), *((way, "memcpy") for way in NS_PER_KIB)}
    lines = result_lines(results)
    assert len(lines) == 1 + sum(len(one.ways) for one in results)
    assert "65,536" in lines[1]
    device.defaults()
