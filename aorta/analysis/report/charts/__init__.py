"""The pictures of a report as PNG files, drawn without a display.

`pictures` pairs the name of each file with the function that draws it; that returns None, or why there is nothing to
draw. Must not touch pyplot or its global backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.report.charts.step_breakdown import draw_breakdown, draw_streams
from aorta.analysis.report.charts.step_lines import draw_devices, draw_overlap_ratio, draw_timeline

TIMELINE_FILE: Final = "{label}_timeline.png"
STREAMS_FILE: Final = "{label}_streams.png"
BREAKDOWN_FILE: Final = "{label}_breakdown.png"
DEVICES_FILE: Final = "{label}_devices.png"
OVERLAP_RATIO_FILE: Final = "overlap_ratio.png"

Draw: TypeAlias = Callable[[Path], str | None]


def pictures(datasets: Sequence[LabelledRun]) -> Iterator[tuple[str, Draw]]:
    """Every picture of a report: file name, and how to draw it."""
    for dataset in datasets:
        yield TIMELINE_FILE.format(label=dataset.label), partial(draw_timeline, dataset)
        yield STREAMS_FILE.format(label=dataset.label), partial(draw_streams, dataset)
        yield BREAKDOWN_FILE.format(label=dataset.label), partial(draw_breakdown, dataset)
        yield DEVICES_FILE.format(label=dataset.label), partial(draw_devices, dataset)
    yield OVERLAP_RATIO_FILE, partial(draw_overlap_ratio, datasets)
