"""Charts of what `summary.json` says: effects with their intervals, single launches, where a step's time goes, and the
collectives of all datasets.

Must not draw an interval that the comparison does not state, or a point for a collective whose transfer is not known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bokeh.models import (
    BasicTickFormatter,
    BoxAnnotation,
    ColumnDataSource,
    FactorRange,
    FixedTicker,
    Range1d,
    Span,
)

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.headline import is_comparable, verdict_label
from aorta.analysis.compare.verdict import NOT_TESTED
from aorta.analysis.documents.comparison import SIDES, ComparedMetric, Comparison
from aorta.analysis.documents.dataset import CollectiveEntry, DatasetEntry
from aorta.analysis.formatting import PAGE, is_zero
from aorta.analysis.report.figure_data import NEEDED, PARTS, parts
from aorta.analysis.report.html.bokeh_chart import Chart, belongs, hover, new_chart, plain
from aorta.analysis.report.palette import BAND, INK, SERIES, light

_INCONCLUSIVE: Final = ("circle", "solid", 1.0)
_STATES: Final = {
    "regression": ("inverted_triangle", "solid", 1.0),
    "improvement": ("triangle", "solid", 1.0),
    "equivalent": ("square", "solid", 1.0),
    "inconclusive": _INCONCLUSIVE,
    NOT_TESTED: ("circle", "dashed", 0.0),
    "not judged": ("x", "dotted", 0.0),
}
"""Of a verdict: marker, line of its interval, and how full the marker is. Said in words above the charts."""
_TONES: Final = {"regression": light("worse"), "improvement": light("better"), "equivalent": light("equal")}
_LAUNCH_METRICS: Final = (("job_step_ms", "Job step", "ms"), ("overlap_ratio", "Overlap ratio", ""))
"""The first is open, the other folded."""
SHOWN_EFFECTS: Final = 5


def effect_charts(comparison: Comparison) -> list[Chart]:
    """Return every metric whose effect has an interval: `SHOWN_EFFECTS` of them, the others folded. Ratios in one
    chart, times and rates in another, as their units differ.
    """
    if not is_comparable(comparison):
        return []
    pairs = {name: pair for name, pair in comparison.shown.items() if _has_interval(pair)}
    order = sorted(pairs, key=lambda name: _importance(name, pairs[name]))
    kinds = {
        "difference": ("ratios", "Candidate less reference.", "percentage points"),
        "quotient": ("times and rates", "Candidate against reference, change in per cent.", "%"),
    }
    charts = []
    for names, more in ((order[:SHOWN_EFFECTS], ""), (order[SHOWN_EFFECTS:], "more ")):
        for kind, (title, caption, axis) in kinds.items():
            mine = {name: pairs[name] for name in names if pairs[name].effect.kind == kind}
            if mine:
                key = f"{more.strip()}-effects-{kind}".lstrip("-")
                charts.append(_effects(key, f"Effects: {more}{title}", caption, axis, mine, folded=bool(more)))
    return charts


def _importance(name: str, pair: ComparedMetric) -> tuple[int, bool, float]:
    """Return a sort key: the primary, the guard, what was decided, then by p; last what only checks the cut-off."""
    role = {"primary": 0, "guard": 1}.get(str(pair.role), 3 if name.endswith("_cutoff") else 2)
    return role, pair.verdict not in _TONES, 1.0 if pair.p is None else pair.p


def _has_interval(pair: ComparedMetric) -> bool:
    found = pair.effect
    return pair.tested and found.low is not None and found.high is not None and not is_zero(pair)


def _effects(
    name: str, title: str, caption: str, axis: str, metrics: Mapping[str, ComparedMetric], *, folded: bool
) -> Chart:
    titles = [plain(each) for each in metrics]
    plot = new_chart(name, 70 + 24 * len(titles), axis, "", y_range=FactorRange(*titles[::-1]))
    plot.min_border_left = 150
    plot.ygrid.grid_line_color = None
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)  # with the minus sign of the tables
    margins = {pair.margin for pair in metrics.values()}
    if len(margins) == 1:
        margin = 100 * margins.pop()
        plot.add_layout(BoxAnnotation(left=-margin, right=margin, fill_color=BAND, line_color=None, level="underlay"))
    plot.add_layout(Span(location=0, dimension="height", line_color=INK, line_width=1))
    pairs = list(metrics.values())
    source = ColumnDataSource(
        {
            "y": titles,
            **{key: [100 * getattr(pair.effect, key) for pair in pairs] for key in ("low", "high", "value")},
            "color": [_TONES.get(pair.verdict or "", light("undecided")) for pair in pairs],
            "verdict": [verdict_label(pair) if pair.verdict else "not judged" for pair in pairs],
            "told": [PAGE.effect(pair.effect.value, pair.effect.kind) for pair in pairs],
            "range": [PAGE.interval(pair.effect) for pair in pairs],
            **{key: [_state(pair)[at] for pair in pairs] for at, key in enumerate(("marker", "dash", "fill"))},
        }
    )
    plot.segment(x0="low", x1="high", y0="y", y1="y", line_color="color", line_width=3, line_dash="dash", source=source)
    look = {"line_color": "color", "fill_color": "color", "fill_alpha": "fill", "line_width": 2}
    dots = plot.scatter(x="value", y="y", marker="marker", size=11, source=source, **look)
    hover(plot, [dots], ("", "@y"), ("effect", "@told"), ("interval", "@range"), ("verdict", "@verdict"))
    return Chart(plot.name, title, caption, plot, folded=folded)


def _state(pair: ComparedMetric) -> tuple[str, str, float]:
    return _STATES.get(pair.verdict or "not judged", _INCONCLUSIVE)


def launch_charts(comparison: Comparison) -> list[Chart]:
    """Return one point a launch, in the order of the plan; empty without launch sets, or where each side has one
    launch: the cards say it.
    """
    launches = comparison.launches
    charts = []
    if not launches or max(map(len, launches.values())) < 2:
        return []
    for name, title, unit in _LAUNCH_METRICS:
        plot = new_chart(f"launches-{name}", 230, "launch of its side", unit or "hidden / all communication")
        plot.xaxis.ticker.min_interval = 1
        if unit:
            plot.y_range.start = 0
        else:
            plot.y_range = Range1d(-0.03, 1.03)  # a share, on its whole range as over the steps
        drawn = False
        for place, side in enumerate(SIDES):
            medians = [each.overlap_ratio if name == "overlap_ratio" else each.job_step_ms for each in launches[side]]
            known = [(at, median) for at, median in enumerate(medians) if median is not None]
            columns = {
                "x": [at for at, _ in known],
                "y": [median for _, median in known],
                "told": [f"{PAGE.number(median, unit or 'ratio')} {unit}" for _, median in known],
                "path": [launches[side][at].path for at, _ in known],
            }
            drawn = drawn or bool(known)
            source, color = ColumnDataSource(columns), SERIES[place][0]
            marker = ("circle", "square")[place]
            dots = plot.scatter(
                x="x", y="y", marker=marker, size=10, fill_color=color, line_color=color, fill_alpha=0.7, source=source
            )
            belongs(dots, place, comparison.label(side))
            hover(plot, [dots], ("run", "$name"), ("", "@told"), ("", "@path"))
        if drawn:
            caption = "One point is the median of one launch."
            charts.append(Chart(plot.name, f"{title}, launch by launch", caption, plot, folded=not unit))
    return charts


def breakdown_chart(datasets: Mapping[str, LabelledRun]) -> list[Chart]:
    """Return the mean ms of a step in five parts that add up to it, over all ranks; empty where it is not known."""
    means = {}
    for label, dataset in datasets.items():
        if set(NEEDED) <= set(dataset.metrics):
            table = parts(dataset)
            if not table.empty:
                means[label] = table.mean()
    if not means:
        return []
    labels = [plain(label) for label in means]
    plot = new_chart("breakdown", 50 + 30 * len(labels), "", "", y_range=FactorRange(*labels[::-1]))
    plot.min_border_left = 150
    plot.ygrid.grid_line_color = None
    left = [0.0] * len(means)
    for title, color, hatch in PARTS:
        lengths = [float(mean[title]) for mean in means.values()]
        right = [start + length for start, length in zip(left, lengths, strict=True)]
        source = ColumnDataSource(
            {"y": labels, "left": left, "right": right, "part": [title] * len(labels), "ms": lengths}
        )
        left = right
        pattern = {"hatch_pattern": "right_diagonal_line", "hatch_color": "white", "hatch_alpha": 0.6} if hatch else {}
        bars = plot.hbar(
            y="y", left="left", right="right", height=0.7, fill_color=color, line_color=None, source=source, **pattern
        )
        hover(plot, [bars], ("", "@y"), ("", "@part"), ("mean", "@ms{0,0.000} ms"))
    plot.x_range.start = 0
    caption = "Mean ms per step and rank; the parts add up to the step."
    return [Chart(plot.name, "Where a step's time goes", caption, plot)]


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
    """Return both charts, or those for which anything is known."""
    charts = [_bandwidth(entries), _waiting(entries)]
    return [chart for chart in charts if chart is not None]


def kinds_drawn(entries: Mapping[str, DatasetEntry]) -> list[tuple[str, str]]:
    """Return kind and the sign that stands for it in the charts."""
    kinds = dict.fromkeys(row.kind for entry in entries.values() for row in entry.matched)
    return [(kind, MARKERS.get(kind, OTHER_MARKER)[1]) for kind in kinds]


def _bandwidth(entries: Mapping[str, DatasetEntry]) -> Chart | None:
    plot = new_chart("bandwidth", 320, "bytes of the collective", "bus bandwidth, GB/s", zoom="both", x_axis_type="log")
    for place, (label, entry) in enumerate(entries.items()):
        rows = [row for row in entry.matched if row.bytes and row.busbw_gb_per_s.median is not None]
        if not rows:
            continue
        found = [row.busbw_gb_per_s for row in rows]
        columns: dict[str, list[Any]] = {
            "x": [row.bytes for row in rows],
            "y": [each.median for each in found],
            "low": [each.p5 for each in found],
            "high": [each.p95 for each in found],
            "told": [
                "{} GB/s ({} to {})".format(*(PAGE.number(value, "GB/s") for value in (each.median, each.p5, each.p95)))
                for each in found
            ],
        }
        _points(plot, place, label, rows, columns, whiskers=True)
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
        columns: dict[str, list[Any]] = {
            "x": [row.transfer_ms.median for row in rows],
            "y": [wait for _, _, wait in chosen],
            "told": [
                f"{'' if rank is None else f'rank {rank} '}waits {PAGE.number(wait, 'ms')} ms, transfer "
                f"{PAGE.number(row.transfer_ms.median, 'ms')} ms"
                for row, rank, wait in chosen
            ],
        }
        _points(plot, place, label, rows, columns, whiskers=False)
    if not plot.renderers:
        return None
    caption = "A point is one rank's median wait in one kind, group and size; the rank that waits least came last."
    if not single:
        caption = "A point is the median wait over all ranks in one kind, group and size."
    return Chart(plot.name, "Wait against transfer", caption, plot, folded=True)


def _wait_points(entry: DatasetEntry) -> Iterator[tuple[CollectiveEntry, str | None, float]]:
    """Yield the row, rank (None: over all) and median wait in ms."""
    for row in entry.matched:
        wait = row.wait_ms
        if row.transfer_ms.median is None or wait.median is None:
            continue
        yield row, None, wait.median
        for rank, median in (wait.per_rank_median or {}).items():
            if median is not None:
                yield row, rank, median


def _points(
    plot: Any,
    place: int,
    label: str,
    rows: Sequence[CollectiveEntry],
    columns: Mapping[str, Sequence[Any]],
    *,
    whiskers: bool,
) -> None:
    """Draw a point for each of `rows`; `columns`: `x`, `y`, `told`, and the ends of whiskers."""
    color = SERIES[place % len(SERIES)][0]
    marker = [MARKERS.get(row.kind, OTHER_MARKER)[0] for row in rows]
    what = [f"{row.kind}, {PAGE.size(row.bytes)}, group {row.group} of {row.group_size or '?'}" for row in rows]
    source = ColumnDataSource({**columns, "marker": marker, "what": what})
    dots = plot.scatter(
        x="x", y="y", marker="marker", size=9, fill_color=color, fill_alpha=0.65, line_color=color, source=source
    )
    belongs(dots, place, label)
    if whiskers:
        bars = plot.segment(x0="x", x1="x", y0="low", y1="high", line_color=color, line_width=1.5, source=source)
        belongs(bars, place, label)
    hover(plot, [dots], ("run", "$name"), ("", "@what"), ("", "@told"))
