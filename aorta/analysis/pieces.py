"""Collectives as tables, for a run of any size: piece by piece, or those that a filter chooses.

Enters: a `Run`. Leaves: frames with the columns of `frames.collective_rows` and `matching.matched`. Must not: cut a
collective in two (a piece holds whole steps of all ranks), or fill the memory without being asked to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import pandas as pd

from aorta.analysis.frames import collective_rows
from aorta.analysis.matching import matched
from aorta.analysis.readers.run_folder import Run
from aorta.errors import InputError

PIECE_ROWS: Final = 1 << 17
"""About 60 MB as a frame."""
ROW_LIMIT: Final = 2_000_000
"""Rows of one frame, about 1 GB; a thousand ranks with a thousand steps of ten collectives have ten million."""


def pieces(run: Run, steps: tuple[int, int] | None = None, rows: int = PIECE_ROWS) -> Iterator[pd.DataFrame]:
    """The collectives of the global steps `steps` (half-open; None: all), in order of step, about `rows` at a time and
    never less than one step of all ranks. `instance` counts on from piece to piece.
    """
    shift = 0
    for first, last in run.columns.step_ranges(rows):
        if steps is not None:
            first, last = max(first, steps[0]), min(last, steps[1])
        if first < last:
            frame = matched(collective_rows(run, steps=(first, last)), run)
            if not frame.empty:
                frame["instance"] += shift
                shift = int(frame["instance"].max()) + 1
                yield frame


def chosen(
    run: Run,
    ranks: Collection[int] | None = None,
    steps: tuple[int, int] | None = None,
    kinds: Collection[str] | None = None,
) -> pd.DataFrame:
    """The collectives that the filters leave, by rank, then order of issue. They are matched across all ranks first.

    Raises:
        InputError: more than `ROW_LIMIT` rows are left.
    """
    parts, total = [matched(collective_rows(run, steps=(0, 0)), run)], 0
    for frame in pieces(run, steps):
        keep = pd.Series(data=True, index=frame.index)
        if ranks is not None:
            keep &= frame["rank"].isin(list(ranks))
        if kinds is not None:
            keep &= frame["kind"].isin(list(kinds))
        parts.append(frame[keep])
        total += len(parts[-1])
        if total > ROW_LIMIT:
            raise InputError(
                f"{run.path}: more than {ROW_LIMIT} collectives are left, of {run.columns.row_count} in the run: "
                "choose with ranks=, steps=, kinds=, or go through aorta.analysis.iter_collectives(...)"
            )
    found = pd.concat([part for part in parts if len(part)]) if total else parts[0]
    return found.sort_values("rank", kind="stable", ignore_index=True)
