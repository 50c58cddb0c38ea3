"""Where the time of a step goes, rank by rank: five parts that add up to the window (`{label}_breakdown.png`).

Must not use medians: the parts would no longer add up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.report.charts.style import heading, new_figure, save, tidy
from aorta.analysis.report.palette import light

PARTS = (
    ("communication hidden in computation", light("hidden"), ""),
    ("computation alone", light("compute"), ""),
    ("exposed communication", light("exposed"), "//"),
    ("copies, optimizer, other", light("other-work"), ""),
    ("idle", light("idle"), ""),
)
NEEDED = ["window_ms", "compute_ms", "compute_comm_ms", "exposed_comm_ms", "idle_ms"]
_LABELLED_RANKS = 16


def parts(dataset: LabelledRun) -> pd.DataFrame:
    """Mean ms per step of each part (columns) for each rank (rows), over the steps used where all are known. Empty
    where there is none, and where marks do not bear them all; one rank is held at a time.
    """
    if any(dataset.pace.basis(name).source != "marks" for name in NEEDED):
        return pd.DataFrame(columns=[title for title, _, _ in PARTS])
    means: dict[int, np.ndarray] = {}
    for rank, tables in dataset.run.ranks.items():
        steps = np.column_stack([tables.steps.column(name) for name in NEEDED])
        known = tables.steps.used & ~np.isnan(steps).any(axis=1)
        if known.any():
            means[rank] = steps[known].mean(axis=0)
    rows = np.array(list(means.values())).reshape(-1, len(NEEDED))
    mean = pd.DataFrame(rows, index=pd.Index(list(means)), columns=pd.Index(NEEDED))
    hidden, exposed, idle = mean["compute_comm_ms"], mean["exposed_comm_ms"], mean["idle_ms"]
    other = (mean["window_ms"] - mean["compute_ms"] - exposed - idle).clip(lower=0)  # below 0 only by rounding
    each = (hidden, mean["compute_ms"] - hidden, exposed, other, idle)
    return pd.DataFrame({title: column for (title, _, _), column in zip(PARTS, each, strict=True)})


def draw_breakdown(dataset: LabelledRun, path: Path) -> str | None:
    """Stacked bars, one a rank, and a last one for the mean of the ranks."""
    if not set(NEEDED) <= set(dataset.metrics):
        return "the record has no overlap metrics"
    table = parts(dataset)
    if table.empty:
        return "no step after warm-up in which communication and computation are both known"
    names = [f"rank {rank}" for rank in table.index] + ["mean"]
    table = pd.concat([table, table.mean().to_frame("mean").T])
    figure = new_figure(min(14.0, 5.5 + 0.45 * len(names)), 4.6)
    axes = figure.subplots()
    places = np.arange(len(names), dtype=float)
    places[-1] += 0.5
    bottom = np.zeros(len(names))
    for title, color, hatch in PARTS:
        heights = table[title].to_numpy(dtype=float)
        axes.bar(places, heights, 0.8, bottom, color=color, hatch=hatch, edgecolor="white", linewidth=0.5, label=title)
        bottom += heights
    every = -(-len(names) // _LABELLED_RANKS)
    shown = [*range(0, len(names) - 1, every), len(names) - 1]
    axes.set_xticks(places[shown], [names[index] for index in shown], rotation=45 if len(shown) > 6 else 0)
    tidy(axes)
    axes.margins(x=0.02)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("mean ms per step")
    handles, titles = axes.get_legend_handles_labels()
    # Beside the bars, in their order from the top.
    axes.legend(handles[::-1], titles[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    heading(figure, axes, dataset, "where a step's time goes (warm-up left out)")
    save(figure, path)
    return None
