"""Charts of what `summary.json` says: effects with their intervals, single launches, where a step's time goes, and the
bandwidth of the collectives of all datasets.

Must not draw an interval that the comparison does not state, or a point for a collective whose transfer is not known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.headline import is_comparable, verdict_label
from aorta.analysis.compare.verdict import NOT_TESTED
from aorta.analysis.documents.comparison import SIDES, ComparedMetric, Comparison
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.formatting import PAGE, is_zero
from aorta.analysis.report.figure_data import NEEDED, PARTS, parts
from aorta.analysis.report.html.bokeh_chart import Chart, bars_of, draw, hover, model, new_chart, plain, source
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
SHOWN_EFFECTS: Final = 5
MARKERS: Final = {
    "allreduce": ("circle", "●"),
    "reducescatter": ("square", "■"),
    "allgather": ("triangle", "▲"),
    "alltoall": ("diamond", "◆"),
}
OTHER_MARKER: Final = ("inverted_triangle", "▼")


def effect_charts(comparison: Comparison) -> list[Chart]:
    """Return every metric whose effect has an interval: `SHOWN_EFFECTS` of them, the others folded. Ratios in one
    chart, times and rates in another, as their units differ. First are the primary, the guard and what was decided,
    then by p; last what only checks the cut-off.
    """
    if not is_comparable(comparison):
        return []

    def importance(name: str) -> tuple[int, bool, float]:
        pair = comparison.shown[name]
        role = {"primary": 0, "guard": 1}.get(str(pair.role), 3 if name.endswith("_cutoff") else 2)
        return role, pair.verdict not in _TONES, 1.0 if pair.p is None else pair.p

    pairs = {name: comparison.shown[name] for name in sorted(comparison.shown, key=importance)}
    pairs = {
        name: pair
        for name, pair in pairs.items()
        if pair.tested and pair.effect.low is not None and pair.effect.high is not None and not is_zero(pair)
    }
    kinds = {
        "difference": ("ratios", "Candidate less reference.", "percentage points"),
        "quotient": ("times and rates", "Candidate against reference, change in per cent.", "%"),
    }
    charts = []
    for names, more in (([*pairs][:SHOWN_EFFECTS], ""), ([*pairs][SHOWN_EFFECTS:], "more ")):
        for kind, (title, caption, axis) in kinds.items():
            mine = {name: pairs[name] for name in names if pairs[name].effect.kind == kind}
            if mine:
                key = f"{more.strip()}-effects-{kind}".lstrip("-")
                plot = bars_of([plain(name) for name in mine], key, 70 + 24 * len(mine), axis)
                # Bokeh's own format of numbers, with the minus sign of the tables.
                plot["below"][0].attributes["formatter"] = model("BasicTickFormatter", use_scientific=False)
                _draw_effects(plot, mine)
                charts.append(Chart(key, f"Effects: {more}{title}", caption, plot, folded=bool(more)))
    return charts


def _draw_effects(plot: Any, metrics: Mapping[str, ComparedMetric]) -> None:
    pairs = list(metrics.values())
    margins = {pair.margin for pair in pairs}
    if len(margins) == 1:
        margin = 100 * margins.pop()
        band = {"left": -margin, "right": margin, "fill_color": BAND, "line_color": None, "level": "underlay"}
        plot["center"].append(model("BoxAnnotation", **band))
    plot["center"].append(model("Span", location=0, dimension="height", line_color=INK, line_width=1))
    states = [_STATES.get(pair.verdict or "not judged", _INCONCLUSIVE) for pair in pairs]
    rows = source(
        {
            "y": [plain(name) for name in metrics],
            **{key: [100 * getattr(pair.effect, key) for pair in pairs] for key in ("low", "high", "value")},
            "color": [_TONES.get(pair.verdict or "", light("undecided")) for pair in pairs],
            "verdict": [verdict_label(pair) if pair.verdict else "not judged" for pair in pairs],
            "told": [PAGE.effect(pair.effect.value, pair.effect.kind) for pair in pairs],
            "range": [PAGE.interval(pair.effect) for pair in pairs],
            **{key: [state[at] for state in states] for at, key in enumerate(("marker", "dash", "fill"))},
        }
    )
    line = {"line_color": "color", "line_width": 3, "line_dash": "dash"}
    draw(plot, "Segment", rows, x0="low", x1="high", y0="y", y1="y", **line)
    look = {"line_color": "color", "fill_color": "color", "fill_alpha": "fill", "line_width": 2}
    dots = draw(plot, "Scatter", rows, x="value", y="y", marker="marker", size=11, **look)
    hover(plot, [dots], ("", "@y"), ("effect", "@told"), ("interval", "@range"), ("verdict", "@verdict"))


def launch_charts(comparison: Comparison) -> list[Chart]:
    """Return the job step of every launch, in the order of the plan; empty without launch sets, where each side has
    one launch (the cards say it), and where no job step is known.
    """
    launches = comparison.launches
    if not launches or max(map(len, launches.values())) < 2:
        return []
    plot = new_chart("launches-job_step_ms", 230, "launch of its side", "ms", y_range=model("DataRange1d", start=0))
    plot["below"][0]["ticker"].attributes["min_interval"] = 1
    drawn = False
    for place, side in enumerate(SIDES):
        known = [(at, each) for at, each in enumerate(launches[side]) if each.job_step_ms is not None]
        columns = {
            "x": [at for at, _ in known],
            "y": [each.job_step_ms for _, each in known],
            "told": [f"{PAGE.number(each.job_step_ms, 'ms')} ms" for _, each in known],
            "path": [each.path for _, each in known],
            "marker": [("circle", "square")[place]] * len(known),
        }
        drawn = drawn or bool(known)
        color = SERIES[place][0]
        look = {"marker": "marker", "size": 10, "fill_color": color, "line_color": color}
        owner = (place, comparison.label(side))
        dots = draw(plot, "Scatter", source(columns), owner, x="x", y="y", fill_alpha=0.7, **look)
        hover(plot, [dots], ("run", "$name"), ("", "@told"), ("", "@path"))
    caption = "One point is the median of one launch."
    return [Chart(plot["name"], "Job step, launch by launch", caption, plot)] if drawn else []


def breakdown_chart(datasets: Mapping[str, LabelledRun]) -> list[Chart]:
    """Return the mean ms of a step in five parts that add up to it, over all ranks; empty where it is not known."""
    tables = {label: parts(dataset) for label, dataset in datasets.items() if set(NEEDED) <= set(dataset.metrics)}
    means = {plain(label): table.mean() for label, table in tables.items() if not table.empty}
    if not means:
        return []
    plot = bars_of([*means], "breakdown", 50 + 30 * len(means), "")
    plot.attributes["x_range"] = model("DataRange1d", start=0)
    left = [0.0] * len(means)
    for title, color, hatch in PARTS:
        lengths = [float(mean[title]) for mean in means.values()]
        right = [start + length for start, length in zip(left, lengths, strict=True)]
        columns = {"y": [*means], "left": left, "right": right, "part": [title] * len(means), "ms": lengths}
        left = right
        pattern = {"hatch_pattern": "right_diagonal_line", "hatch_color": "white", "hatch_alpha": 0.6} if hatch else {}
        look = {"y": "y", "left": "left", "right": "right", "height": 0.7, "fill_color": color, "line_color": None}
        bars = draw(plot, "HBar", source(columns), **look, **pattern)
        hover(plot, [bars], ("", "@y"), ("", "@part"), ("mean", "@ms{0,0.000} ms"))
    caption = "Mean ms per step and rank; the parts add up to the step."
    return [Chart(plot["name"], "Where a step's time goes", caption, plot)]


def kinds_drawn(entries: Mapping[str, DatasetEntry]) -> list[tuple[str, str]]:
    """Return kind and the sign that stands for it in the chart of bandwidth."""
    kinds = dict.fromkeys(row.kind for entry in entries.values() for row in entry.matched)
    return [(kind, MARKERS.get(kind, OTHER_MARKER)[1]) for kind in kinds]


def comm_charts(entries: Mapping[str, DatasetEntry]) -> list[Chart]:
    """Return the bus bandwidth over the size of collectives, with its 5th to 95th percentile; empty where fewer than
    two sizes are known: the table says more of one.
    """
    heights = model("DataRange1d", start=0)
    names = "bytes of the collective", "bus bandwidth, GB/s"
    plot = new_chart("bandwidth", 320, *names, zoom="both", log=True, y_range=heights)
    sizes: list[int] = []
    for place, (label, entry) in enumerate(entries.items()):
        rows = [row for row in entry.matched if row.bytes and row.busbw_gb_per_s.median is not None]
        if not rows:
            continue
        sizes += [row.bytes for row in rows if row.bytes]
        found = [row.busbw_gb_per_s for row in rows]
        columns = {
            "x": [row.bytes for row in rows],
            "y": [each.median for each in found],
            "low": [each.p5 for each in found],
            "high": [each.p95 for each in found],
            "marker": [MARKERS.get(row.kind, OTHER_MARKER)[0] for row in rows],
            "what": [
                f"{row.kind}, {PAGE.size(row.bytes)}, group {row.group} of {row.group_size or '?'}" for row in rows
            ],
            "told": [
                "{} GB/s ({} to {})".format(*(PAGE.number(value, "GB/s") for value in (each.median, each.p5, each.p95)))
                for each in found
            ],
        }
        color, owner, points = SERIES[place % len(SERIES)][0], (place, label), source(columns)
        look = {"size": 9, "fill_color": color, "fill_alpha": 0.65, "line_color": color}
        dots = draw(plot, "Scatter", points, owner, x="x", y="y", marker="marker", **look)
        draw(plot, "Segment", points, owner, x0="x", x1="x", y0="low", y1="high", line_color=color, line_width=1.5)
        hover(plot, [dots], ("run", "$name"), ("", "@what"), ("", "@told"))
    if len(set(sizes)) < 2:
        return []
    ticks = round_sizes(min(sizes), max(sizes))
    written = {tick: PAGE.size(tick) for tick in ticks}
    plot["below"][0].attributes |= {"ticker": model("FixedTicker", ticks=ticks), "major_label_overrides": written}
    plot.attributes["x_range"] = model("Range1d", start=ticks[0], end=ticks[-1])
    caption = "Median of each kind, group and size; the bar reaches from the 5th to the 95th percentile."
    return [Chart(plot["name"], "Bandwidth over size", caption, plot)]


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
