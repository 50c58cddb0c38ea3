"""What ran inside one step of a trace, also where the windows of steps overlap."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from aorta.analysis.frames import Lane
from aorta.analysis.load.traces import load_traces
from tests.analysis.load.kineto_files import ALLREDUCE, document, kernel, step


def test_steps_whose_windows_overlap_keep_their_own_segments(tmp_path: Path) -> None:
    # Step 5 was marked from 0 to 30 us, step 2 from 20 to 60 us: in the order of their numbers 2 comes first.
    rows = [step(5, 0, 30), step(2, 20, 40), kernel("gemm", 2, 10), kernel(ALLREDUCE, 25, 10, 0, 20)]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document(rows)))
    tables = load_traces(str(path)).ranks[0]
    assert tables.steps.global_step.tolist() == [2, 5]
    metrics = tables.steps.metrics
    spans = tables.details.spans(np.arange(2)).of_lanes(Lane.COMPUTE)
    computing = np.bincount(spans.step, spans.end_ns - spans.start_ns, 2) / 1e6
    assert computing.tolist() == metrics["compute_ms"].tolist()
    for place in range(2):
        found = tables.details.step(place)
        assert found.length_ns == tables.steps.length_ns[place]
        assert [part.end_ns for part in found.segments[:-1]] == [part.start_ns for part in found.segments[1:]]
        active = {name: sum(end - start for start, end in spans) / 1e6 for name, spans in found.active().items()}
        assert active.get("compute", 0.0) == metrics["compute_ms"][place]
        assert active.get("allreduce", 0.0) == metrics["allreduce_ms"][place]
    assert metrics["allreduce_ms"].tolist() == [0.010, 0.005]
