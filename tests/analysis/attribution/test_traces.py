"""The same of traces that AORTA did not make: which collective, which part; no blocks, which a trace does not tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.attribute import attribute
from aorta.read.traces.load import load_traces
from tests.analysis.attribution.test_attribute import exact
from tests.read.kineto_files import ALLREDUCE, document, kernel, step

US = 1_000


def traces(folder: Path, length_us: int, late_us: int) -> LabelledRun:
    """Two steps of 200 us on two ranks: compute from 10 to 40, an all-reduce from 30 on for which rank 1 comes late."""
    folder.mkdir()
    for rank in (0, 1):
        events = []
        for number in range(2):
            start = number * 200
            begin = 30 + (late_us if rank == 1 else 0)
            events += [step(number + 5, start, 200), kernel("gemm", start + 10, 30, rank)]
            one = kernel(ALLREDUCE, start + begin, 30 + late_us + length_us - begin, rank, 20)
            one["args"] |= {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000}
            one["args"] |= {"Seq": number, "Group size": 2, "dtype": "Float", "Process Group Name": "0"}
            events.append(one)
        about = {
            "backend": "nccl",
            "rank": rank,
            "world_size": 2,
            "pg_config": [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}],
        }
        (folder / f"{rank}.json").write_text(json.dumps(document(events, distributedInfo=about, cupti_version=26)))
    return LabelledRun(folder.name, load_traces(str(folder)))


def test_a_longer_transfer_is_told_from_a_later_peer(tmp_path: Path) -> None:
    base, other = traces(tmp_path / "base", 20, 0), traces(tmp_path / "longer", 60, 0)
    longer = attribute(base, other)
    exact(longer)
    assert longer.reference.exposed_comm_ns == 4 * 10 * US
    assert longer.difference_ms == pytest.approx(0.040)
    assert longer.dimensions["part"][0].part == "transfer"
    later = attribute(base, traces(tmp_path / "later", 20, 50))
    exact(later)
    # rank 0 waits from 30 to 80, 40 of it exposed; on rank 1, which comes at 80, nothing is hidden any more
    parts = {row.part: row.difference_ms for row in later.dimensions["part"]}
    assert parts == pytest.approx({"wait": 0.040 / 2, "transfer": 0.010})
