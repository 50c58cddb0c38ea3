"""Charts of the collectives of all datasets: bandwidth over size, and waiting against transfer.

Must not draw a point for a collective whose transfer is not known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Final

from bokeh.models import ColumnDataSource, FixedTicker

from aorta.analysis.documents.dataset import CollectiveEntry, DatasetEntry
from aorta.analysis.formatting import PAGE
from aorta.analysis.report.html.bokeh_chart import Chart, belongs, hover, new_chart
from aorta.analysis.report.palette import SERIES

MARKERS: Final = {
    "allreduce": ("circle", "●"),
    "reducescatter": ("square", "■"),
    "allgather": ("triangle", "▲"),
    "alltoall": ("diamond", "◆"),
}
OTHER_MARKER: Final = ("inverted_triangle", "▼")
POINT_LIMIT: Final = 4_000
"""Points of waiting, one a rank and entry; with more, one an entry."""


def comm_charts(entries: Mapping[str, DatasetEntry]) -> list[Chart]:
    """Both charts, or those for which anything is known."""
    charts = [_bandwidth(entries), _waiting(entries)]
    return [chart for chart in charts if chart is not None]


def kinds_drawn(entries: Mapping[str, DatasetEntry]) -> list[tuple[str, str]]:
    """Kind and the sign that stands for it in the charts."""
    kinds = dict.fromkeys(row.kind for entry in entries.values() for row in entry.matched)
    return [(kind, MARKERS.get(kind, OTHER_MARKER)[1]) for kind in kinds]


def _bandwidth(entries: Mapping[str, DatasetEntry]) -> Chart | None:
    plot = new_chart("bandwidth", 320, "bytes of the collective", "bus bandwidth, GB/s", zoom="both", x_axis_type="log")
    for place, (label, entry) in enumerate(entries.items()):
        rows = [row for row in entry.matched if row.bytes and row.busbw_gb_per_s.median is not None]
        if not rows:
            continue
        columns = _about(rows)
        columns |= {"x": [row.bytes for row in rows]}
        found = [row.busbw_gb_per_s for row in rows]
        columns |= {"y": [each.median for each in found]}
        columns |= {"low": [each.p5 for each in found], "high": [each.p95 for each in found]}
        columns["told"] = [
            "{} GB/s ({} to {})".format(*(PAGE.number(value, "GB/s") for value in (each.median, each.p5, each.p95)))
            for each in found
        ]
        _points(plot, place, label, columns, whiskers=True)
    if not plot.renderers:
        return None
    plot.y_range.start = 0
    sizes = [row.bytes for entry in entries.values() for row in entry.matched if row.bytes]
    ticks = round_sizes(min(sizes), max(sizes))
    plot.xaxis.ticker = FixedTicker(ticks=ticks)
    plot.xaxis.major_label_overrides = {float(tick): PAGE.size(tick) for tick in ticks}
    caption = "Median of each kind, group and size; the bar reaches from the 5th to the 95th percentile."
    return Chart(plot.name, "Bandwidth over size", caption, plot)


def round_sizes(least: int, most: int) -> list[int]:
    """Round sizes from `least` to `most` bytes, three or more where 2 % of a decade is fine enough, and the one on
    either side. Bokeh's own ticks of an axis of logarithms are written 6.000e+5 where it spans less than a decade.
    """
    sizes: list[int] = []
    for mantissas in ((10,), (10, 20, 50), range(10, 100, 10), range(10, 100, 2)):
        sizes = sorted({mantissa * 10**power // 10 for power in range(14) for mantissa in mantissas} | {0})
        first, behind = bisect_left(sizes, least), bisect_right(sizes, most)
        if behind - first >= 3:
            break
    return [size for size in sizes[max(first - 1, 0) : behind + 1] if size]


def _waiting(entries: Mapping[str, DatasetEntry]) -> Chart | None:
    plot = new_chart("waiting", 320, "transfer, ms", "wait for peers, ms", zoom="both")
    points = {label: list(_wait_points(entry)) for label, entry in entries.items()}
    single = sum(map(len, points.values())) <= POINT_LIMIT
    for place, (label, found) in enumerate(points.items()):
        chosen = found if single else [point for point in found if point[1] is None]
        chosen = [point for point in chosen if single is (point[1] is not None)]
        if not chosen:
            continue
        rows = [row for row, _, _ in chosen]
        columns = _about(rows)
        columns["x"] = [row.transfer_ms.median for row in rows]
        columns["y"] = [wait for _, _, wait in chosen]
        columns["told"] = [
            f"{'' if rank is None else f'rank {rank} '}waits {PAGE.number(wait, 'ms')} ms, transfer "
            f"{PAGE.number(row.transfer_ms.median, 'ms')} ms"
            for row, rank, wait in chosen
        ]
        _points(plot, place, label, columns, whiskers=False)
    if not plot.renderers:
        return None
    caption = "A point is one rank's median wait in one kind, group and size; the rank that waits least came last."
    if not single:
        caption = "A point is the median wait over all ranks in one kind, group and size."
    return Chart(plot.name, "Wait against transfer", caption, plot, folded=True)


def _wait_points(entry: DatasetEntry) -> Iterator[tuple[CollectiveEntry, str | None, float]]:
    """Row, rank (None: over all) and median wait in ms."""
    for row in entry.matched:
        wait = row.wait_ms
        if row.transfer_ms.median is None or wait.median is None:
            continue
        yield row, None, wait.median
        for rank, median in (wait.per_rank_median or {}).items():
            if median is not None:
                yield row, rank, median


def _about(rows: list[CollectiveEntry]) -> dict[str, list[Any]]:
    return {
        "marker": [MARKERS.get(row.kind, OTHER_MARKER)[0] for row in rows],
        "what": [f"{row.kind}, {PAGE.size(row.bytes)}, group {row.group} of {row.group_size or '?'}" for row in rows],
    }


def _points(plot: Any, place: int, label: str, columns: dict[str, list[Any]], *, whiskers: bool) -> None:
    color = SERIES[place % len(SERIES)][0]
    source = ColumnDataSource(columns)
    dots = plot.scatter(
        x="x", y="y", marker="marker", size=9, fill_color=color, fill_alpha=0.65, line_color=color, source=source
    )
    belongs(dots, place, label)
    if whiskers:
        bars = plot.segment(x0="x", x1="x", y0="low", y1="high", line_color=color, line_width=1.5, source=source)
        belongs(bars, place, label)
    hover(plot, [dots], ("run", "$name"), ("", "@what"), ("", "@told"))
