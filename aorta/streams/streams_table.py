"""The results of `workload=streams` as text: one row a pattern, one column a number of streams, the knee marked.

Must not compute anything that `streams.json` does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from aorta.records.streams_file import QUEUE_VARIABLES, StreamsPattern, StreamsRank
from aorta.terminal_style import Style

_CELL = 5


def table(report: StreamsRank, knee_tolerance: float, style: Style) -> str:
    """The whole text; the knee's cell has a star, and is bold on a terminal."""
    return "\n".join(_lines(report, knee_tolerance, style))


def _lines(report: StreamsRank, knee_tolerance: float, style: Style) -> Iterator[str]:
    counts = sorted({point.streams for pattern in report.patterns for point in pattern.points})
    width = max(len(pattern.name) for pattern in report.patterns)
    variables = ", ".join(f"{name} {report.environment.get(name, 'not set')}" for name in QUEUE_VARIABLES)
    yield f"rank {report.rank}, {report.device}; {variables}"
    yield "throughput against one stream, by number of streams:"
    yield f"{'streams':<{width}} " + " ".join(f"{n:>{_CELL}} " for n in counts) + "   knee  at once there: mean, most"
    for pattern in report.patterns:
        yield _row(pattern, counts, width, style)
    yield f"* the knee: more streams gain at most {knee_tolerance:.0%}"
    if not all(point.issued_in_time for pattern in report.patterns for point in pattern.points):
        yield "! the host issued too late, the device can do more"
    yield from _queues(report, style)


def _row(pattern: StreamsPattern, counts: list[int], width: int, style: Style) -> str:
    if pattern.skipped is not None:
        return f"{pattern.name:<{width}} {style.faint('skipped: ' + pattern.skipped)}"
    by_count = {point.streams: point for point in pattern.points}
    cells = []
    for count in counts:
        point, at_knee = by_count[count], count == pattern.knee_streams
        text = f"{point.gain:>{_CELL}.2f}" + ("!" if not point.issued_in_time else "*" if at_knee else " ")
        cells.append(style.bold(text) if at_knee else text)
    assert pattern.knee_streams is not None  # only what was skipped has none
    there = by_count[pattern.knee_streams]
    knee = style.bold(f"{pattern.knee_streams:>4}")
    return f"{pattern.name:<{width}} {' '.join(cells)}   {knee} {there.concurrency:>21.2f}{there.most_at_once:>6}"


def _queues(report: StreamsRank, style: Style) -> Iterator[str]:
    streams = sum(map(len, report.queues))
    shared = [queue for queue in report.queues if len(queue) > 1]
    if not shared:
        yield f"hardware queues: none of {streams} streams shared one"
        return
    yield style.bold(f"hardware queues: {len(report.queues)} for {streams} streams; these streams share one:")
    for queue in shared:
        yield "  " + ", ".join(map(str, queue))
