"""Draws memory over time as one self-contained HTML file.

    python -m aorta.profiling.memory_timeline TRACE OUT.html [-]

TRACE is a Chrome trace (.json) whose window recorded allocations (`[memory]` events); with `-`, what `by_category`
gives is read as JSON from the standard input. Per device the page shows a curve of allocated bytes, its peak, and the
largest allocations alive at the peak with the operator and the Python line that made them; and its division into
parameters, gradients and so on, stacked. It runs in its own process, so that reading a large trace does not stall
training. Must not import torch in that process, or refer to anything on a network.
"""

from __future__ import annotations

import html
import json
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aorta.installation import own_environment, own_program
from aorta.records.files import write_whole

WIDTH, HEIGHT = 1000, 260
POINTS = 2_000
"""Points of a drawn curve; each is the maximum of its slice, so no peak is lost."""
LARGEST = 25
DEVICE_KINDS = {0: "CPU", 1: "GPU", 20: "GPU"}
"""c10::DeviceType: 0 CPU, 1 CUDA (also HIP behind torch's CUDA interface), 20 HIP."""
NAMES = {
    "PARAMETER": "parameters",
    "GRADIENT": "gradients",
    "OPTIMIZER_STATE": "optimizer state",
    "ACTIVATION": "activations",
    "INPUT": "inputs",
    "TEMPORARY": "temporary",
    "AUTOGRAD_DETAIL": "autograd's own",
    None: "unknown",
}
"""torch's category -> name on the page, in the order in which they are stacked."""
COLOURS = ("#1f77b4", "#d62728", "#9467bd", "#2ca02c", "#ff7f0e", "#8c564b", "#bcbd22", "#7f7f7f")
"""Of the categories, in their order."""


def by_category(results: Any) -> dict[str, dict[str, Any]]:
    """Return device (`cpu`, `cuda:0`) -> `times_us`, and `bytes`: category -> bytes allocated at each of these times.

    torch infers a tensor's category from the window itself, which needs shapes, stacks, allocations and at least one
    whole step. It reads every event in Python: never on the training thread.

    Raises:
        Exception: this torch does not offer it, or cannot make it of this window.
    """
    from torch.profiler import _memory_profiler as of_torch

    timeline = of_torch.MemoryProfileTimeline(of_torch.MemoryProfile(results))
    # Column 0 of each row is torch's own, for stacking.
    columns = {index + 1: category for category, index in of_torch._CATEGORY_TO_INDEX.items()}
    by_device: dict[str, dict[str, Any]] = {}
    for device in sorted({str(key.device) for _, _, (key, _), _ in timeline.timeline}):
        times, rows = timeline._coalesce_timeline(device)  # type: ignore[no-untyped-call]
        sizes = {
            NAMES[category and category.name]: [row[column] for row in rows] for column, category in columns.items()
        }
        by_device[device] = {"times_us": times, "bytes": {name: sizes[name] for name in NAMES.values()}}
    return by_device


class Allocation(NamedTuple):
    """One `[memory]` event: time in microseconds since the trace began, bytes allocated (negative: freed)."""

    ts_us: float
    bytes: int
    address: int
    allocated: int
    reserved: int
    thread: tuple[Any, Any]


class Live(NamedTuple):
    """An allocation alive at the peak; `operator` and `line` are "" where the trace does not have them."""

    bytes: int
    operator: str
    shapes: str
    line: str


@dataclass(frozen=True)
class Timeline:
    """One device: its events in order of time, and the allocations alive at the peak."""

    device: str
    events: list[Allocation]
    peak: Allocation
    live: list[Live]
    live_bytes: int


def timelines(trace: dict[str, Any]) -> list[Timeline]:
    """Return the memory timelines in a trace, one per device, the CPU first."""
    devices: dict[tuple[int, int], list[Allocation]] = defaultdict(list)
    spans: dict[tuple[Any, Any, Any], list[dict[str, Any]]] = defaultdict(list)  # of a category on a thread
    for event in trace.get("traceEvents", ()):
        if not isinstance(event, dict):
            continue
        thread = event.get("pid"), event.get("tid")
        if event.get("name") == "[memory]":
            args = event["args"]
            address, total, reserved = (int(args.get(key, 0)) for key in ("Addr", "Total Allocated", "Total Reserved"))
            devices[int(args.get("Device Type", 0)), int(args.get("Device Id", -1))].append(
                Allocation(float(event["ts"]), int(args["Bytes"]), address, total, reserved, thread)
            )
        elif event.get("ph") == "X":
            spans[event.get("cat"), *thread].append(event)
    for of_thread in spans.values():
        of_thread.sort(key=lambda span: float(span["ts"]))

    def innermost(category: str, event: Allocation) -> dict[str, Any]:
        """Return the innermost span around an event; nothing without one. Spans of a thread are nested: it is the last
        one that began before and has not ended.
        """
        around = spans.get((category, *event.thread), [])
        for index in range(bisect_right(around, event.ts_us, key=lambda span: float(span["ts"])) - 1, -1, -1):
            if float(around[index]["ts"]) + float(around[index].get("dur", 0)) >= event.ts_us:
                return around[index]
        return {}

    made = []
    for (kind, number), events in sorted(devices.items()):
        events.sort(key=lambda event: event.ts_us)
        peak = max(events, key=lambda event: event.allocated)
        alive: dict[int, Allocation] = {}
        for event in events:
            if event.bytes > 0:
                alive[event.address] = event
            else:
                alive.pop(event.address, None)
            if event is peak:
                break
        live = []
        for event in sorted(alive.values(), key=lambda event: -event.bytes)[:LARGEST]:
            operator, function = innermost("cpu_op", event), innermost("python_function", event)
            shapes = operator.get("args", {}).get("Input Dims", "")
            shown = json.dumps(shapes) if shapes else ""
            live.append(Live(event.bytes, operator.get("name", ""), shown, function.get("name", "")))
        name = DEVICE_KINDS.get(kind, f"device type {kind}") + (f" {number}" if number >= 0 else "")
        made.append(Timeline(name, events, peak, live, sum(event.bytes for event in alive.values())))
    return made


def page(trace: dict[str, Any], title: str, categories: Mapping[str, Any] | None = None) -> str:
    """Return the whole HTML page; `categories` as `by_category` gives them."""
    made = timelines(trace)
    sections = [_section(timeline) for timeline in made] or [
        "<p>The trace holds no <code>[memory]</code> events: nothing was allocated while it was recorded.</p>"
    ]
    sections += [
        _stack(device, curves["times_us"], curves["bytes"])
        for device, curves in (categories or {}).items()
        if curves["times_us"]
    ]
    highest = "; ".join(
        f"{timeline.device}: max allocated {_size(timeline.peak.allocated)}, "
        f"max reserved {_size(max(event.reserved for event in timeline.events))}"
        for timeline in made
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n<style>'
        "body{font:14px sans-serif;margin:2em;max-width:1100px}svg{background:#f7f7f7;width:100%}"
        "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:left;border-bottom:1px solid #ddd}"
        "td.n{text-align:right;font-variant-numeric:tabular-nums}</style></head><body>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(highest)}</p>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _peaks(sizes: Sequence[int]) -> list[int]:
    """Return the indices that are drawn: the largest value of each slice."""
    step = max(1, -(-len(sizes) // POINTS))
    slices = (range(start, min(start + step, len(sizes))) for start in range(0, len(sizes), step))
    return [max(indices, key=sizes.__getitem__) for indices in slices]


def _section(timeline: Timeline) -> str:
    events, peak = timeline.events, timeline.peak
    begin, span = events[0].ts_us, max(events[-1].ts_us - events[0].ts_us, 1e-9)
    points: list[str] = []
    last: float | None = None
    for event in (events[index] for index in _peaks([event.allocated for event in events])):
        x, y = (event.ts_us - begin) / span * WIDTH, HEIGHT - event.allocated / max(peak.allocated, 1) * HEIGHT * 0.92
        points += [f"{x:.2f},{last:.2f}"] if last is not None else []
        points.append(f"{x:.2f},{y:.2f}")
        last = y
    line, peak_x = " ".join(points), (peak.ts_us - begin) / span * WIDTH
    rows = "\n".join(
        f'<tr><td class="n">{_size(live.bytes)}</td><td>{html.escape(live.operator)}</td>'
        f"<td>{html.escape(live.shapes)}</td><td>{html.escape(live.line)}</td></tr>"
        for live in timeline.live
    )
    return (
        f'<h2>{html.escape(timeline.device)}</h2>\n<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f'<polygon fill="#9ecae1" stroke="none" points="0,{HEIGHT} {line} {WIDTH},{HEIGHT}"/>'
        f'<polyline fill="none" stroke="#08519c" points="{line}"/>'
        f'<line x1="{peak_x:.2f}" x2="{peak_x:.2f}" y1="0" y2="{HEIGHT}" stroke="#d62728" stroke-dasharray="4"/></svg>'
        f"<p>{span / 1e3:.3f} ms, left to right; the dashed line is the peak.</p>\n"
        f"<p>Peak {_size(peak.allocated)}, of which {_size(timeline.live_bytes)} were allocated in this recording. "
        f"{len(events)} events.</p>\n"
        "<h3>Largest allocations alive at the peak</h3>\n<table><tr><th>size</th><th>operator</th><th>input shapes</th>"
        f"<th>Python</th></tr>\n{rows}\n</table>"
    )


def _stack(device: str, times_us: list[float], sizes: dict[str, list[int]]) -> str:
    """Return the bytes by category over time, one above the other, and each at the peak."""
    total = [sum(column) for column in zip(*sizes.values(), strict=True)]
    peak, drawn = max(range(len(total)), key=total.__getitem__), _peaks(total)
    begin, span, top = times_us[0], max(times_us[-1] - times_us[0], 1e-9), max(total[peak], 1)
    xs = [f"{(times_us[index] - begin) / span * WIDTH:.2f}" for index in drawn]
    below, shapes, rows = [0] * len(drawn), [], []
    for (name, column), colour in zip(sizes.items(), COLOURS, strict=True):
        above = [low + column[index] for low, index in zip(below, drawn, strict=True)]
        edge = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        points = " ".join(f"{x},{HEIGHT - size / top * HEIGHT * 0.92:.2f}" for x, size in edge)
        shapes.append(f'<polygon fill="{colour}" stroke="none" points="{points}"><title>{name}</title></polygon>')
        rows.append(
            f'<tr><td style="background:{colour}">&nbsp;</td><td>{name}</td><td class="n">{_size(column[peak])}</td>'
            f'<td class="n">{_size(max(column))}</td></tr>'
        )
        below = above
    return (
        f'<h2>{html.escape(device)} by category</h2>\n<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        + "".join(shapes)
        + f"</svg>\n<p>{span / 1e3:.3f} ms. The categories are inferred by torch from this window alone.</p>\n"
        "<table><tr><th></th><th>category</th><th>at the peak</th><th>at most</th></tr>\n"
        + "\n".join(rows)
        + "\n</table>"
    )


def _size(number: float) -> str:
    """Return the bytes in the largest binary unit (powers of 1024) that leaves a digit before the point."""
    if abs(number) < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if abs(number) < 1024 or unit == "GiB":
            break
    return f"{number:.2f} {unit}"


def draw(trace: Path, target: Path, categories: dict[str, Any]) -> None:
    """Draw the page in a separate process: reading a large trace would hold the GIL.

    Raises:
        OSError: it failed; includes its error output.
    """
    done = subprocess.run(
        own_program("aorta.profiling.memory_timeline", str(trace), str(target), "-"),
        input=json.dumps(categories),
        capture_output=True,
        text=True,
        env=own_environment(),
        check=False,
    )
    if done.returncode:
        raise OSError(f"memory timeline: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")


def main(words: Sequence[str]) -> int:
    """Read a trace and the categories, write the page."""
    source, target = map(Path, words[:2])
    trace, categories = json.loads(source.read_text()), json.load(sys.stdin) if words[2:] == ["-"] else {}
    write_whole(target, page(trace, target.name.removesuffix(".html"), categories).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
