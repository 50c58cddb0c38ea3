"""One window from lists of `(start, end)` pairs, in any order, as `overlap.measure_windows` measures it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aorta.timeline.arrays import Interval, IntervalArray, interval_array, merge
from aorta.timeline.overlap import CertainLanes, Overlap, measure_windows


@dataclass(frozen=True)
class Certain:
    """What certainly ran, as lists of pairs."""

    compute: Iterable[Interval]
    comm: Mapping[str, Iterable[Interval]]
    stalls: Iterable[Interval]
    bubbles: Iterable[Interval] | None = None


def lane(spans: Iterable[Interval]) -> IntervalArray:
    """Merged columns."""
    return merge(interval_array(spans))


def lanes(comm: Mapping[str, Iterable[Interval]]) -> dict[str, IntervalArray]:
    """Merged columns by kind."""
    return {kind: lane(spans) for kind, spans in comm.items()}


def measure_window(
    window: Interval,
    *,
    compute: Iterable[Interval],
    comm: Mapping[str, Iterable[Interval]],
    stalls: Iterable[Interval] | None = (),
    aux: Iterable[Interval] | None = (),
    certain: Certain | None = None,
    **others: Any,
) -> Overlap:
    """One window, with its tiles; `others` are further lanes, of which None was not observed."""
    observed = {"stalls": stalls, "aux": aux, **others}
    surely = None
    if certain is not None:
        sure = lane(certain.compute), lanes(certain.comm), lane(certain.stalls), lane(certain.bubbles or ())
        surely = CertainLanes([True], *sure)
    (measured,) = measure_windows(
        interval_array([window]),
        compute=lane(compute),
        comm=lanes(comm),
        certain=surely,
        tiled=True,
        **{name: None if spans is None else lane(spans) for name, spans in observed.items()},
    )
    return measured
