"""The results of `workload=streams` as text: one row a pattern, one column a number of streams, the knee marked.

Must not compute anything that `streams.json` does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from aorta.records.streams_file import StreamsPattern, StreamsRank
from aorta.terminal_style import Style


def table(report: StreamsRank, knee_tolerance: float, style: Style) -> str:
    """The whole text; the knee's cell has a star, and is bold on a terminal."""
    return "\n".join(_lines(report, knee_tolerance, style))


def _lines(report: StreamsRank, knee_tolerance: float, style: Style) -> Iterator[str]:
    counts = sorted({point.streams for pattern in report.patterns for point in pattern.points})
    width = max(len(pattern.name) for pattern in report.patterns)
    cell = max(5, *(len(str(n)) for n in counts)) if counts else 5
    variables = ", ".join(f"{name}={value}" for name, value in report.environment.items()) or "no limit of queues set"
    yield f"{report.device}: throughput against one stream, by number of streams ({variables})"
    yield f"{'streams':<{width}} " + " ".join(f"{n:>{cell}} " for n in counts) + "   knee"
    for pattern in report.patterns:
        yield _row(pattern, counts, width, cell, style)
    yield (
        f"* the knee: more streams gain less than {knee_tolerance:.0%}; ! the host issued too late, the device can "
        "do more"
    )
    yield from _queues(report, style)


def _row(pattern: StreamsPattern, counts: list[int], width: int, cell: int, style: Style) -> str:
    if pattern.skipped is not None:
        return f"{pattern.name:<{width}} {style.faint('skipped: ' + pattern.skipped)}"
    by_count = {point.streams: point for point in pattern.points}
    cells = []
    for count in counts:
        point = by_count.get(count)
        text = f"{'-' if point is None else format(point.gain, '.2f'):>{cell}}"
        at_knee = count == pattern.knee_streams
        mark = "!" if point is not None and not point.issued_in_time else "*" if at_knee else " "
        cells.append(style.bold(text + mark) if at_knee else text + mark)
    return f"{pattern.name:<{width}} {' '.join(cells)}   {style.bold(format(pattern.knee_streams, '>4'))}"


def _queues(report: StreamsRank, style: Style) -> Iterator[str]:
    streams = sum(map(len, report.queues))
    shared = [queue for queue in report.queues if len(queue) > 1]
    if not shared:
        yield f"hardware queues: none of {streams} streams shared one"
        return
    yield style.bold(f"hardware queues: {len(report.queues)} for {streams} streams; these streams share one:")
    for queue in shared:
        yield "  " + ", ".join(map(str, queue))
