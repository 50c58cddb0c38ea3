"""Rules of the interval algebra and of the metrics of one window."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import rules

_OVERLAP = ("tests/timeline/test_overlap.py",)
_ARRAYS = ("tests/timeline/test_arrays.py",)

TIMELINE: Final = (
    *rules(
        "aorta.timeline.intervals",
        ("tests/timeline/test_intervals.py",),
        ("abutting intervals stay apart", "start <= last_end:", "start < last_end:"),
        ("an interval inside another shortens the union", "            if end > last_end:\n", "            if True:\n"),
        ("empty intervals are kept in a union", "        if end == start:\n            continue\n", ""),
        (
            "a union takes inverted intervals",
            "        if end < start:\n            raise inverted(start, end)\n        if end == start",
            "        if end == start",
        ),
        (
            "common time of no length is kept",
            "        if start < end:\n            common.append",
            "        if start <= end:\n            common.append",
        ),
        (
            "the interval that ends later is passed first",
            "if left[i][1] < right[j][1]:",
            "if left[i][1] > right[j][1]:",
        ),
        ("one interval takes only one piece away", "            k += 1\n", "            break\n"),
        (
            "what is left behind the last hole is lost",
            "        if start < end:\n            rest.append((start, end))\n",
            "",
        ),
        (
            "clipping keeps what lies outside",
            "        start, end = max(start, low), min(end, high)\n",
            "        end = min(end, high)\n",
        ),
        (
            "clipping keeps parts of no length",
            "        if start < end:\n            inside.append",
            "        if start <= end:\n            inside.append",
        ),
    ),
    *rules(
        "aorta.timeline.arrays",
        _ARRAYS,
        ("columns that abut stay apart", "apart = start[1:] > reach[:-1]", "apart = start[1:] >= reach[:-1]"),
        ("a long interval is forgotten behind a short one", "reach = np.maximum.accumulate(end)", "reach = end"),
        ("columns are taken as sorted", "    if not (start[1:] >= start[:-1]).all():\n", "    if False:\n"),
        ("empty columns are kept", "    if not filled.all():\n", "    if False:\n"),
        (
            "intervals that only touch have time in common",
            'low = np.searchsorted(right.end, left.start, side="right")',
            'low = np.searchsorted(right.end, left.start, side="left")',
        ),
        (
            "the time before the first hole is lost",
            "start = np.concatenate((left.start[:1], right.end))",
            "start = np.concatenate((right.end[:1], right.end))",
        ),
        (
            "a cut leaves out what reaches over its start",
            'low = int(np.searchsorted(merged.end, window[0], side="right"))',
            'low = int(np.searchsorted(merged.start, window[0], side="left"))',
        ),
        (
            "a window of no length has tiles",
            "    if window[0] >= window[1]:\n        return spans(), np.zeros(0, np.int64)\n",
            "",
        ),
        ("columns take inverted intervals", "    if inverted.any():\n", "    if False:\n"),
    ),
    *rules(
        "aorta.timeline.overlap",
        _OVERLAP,
        ("all communication is exposed", "return self.comm_ns - self.hidden_ns", "return self.comm_ns"),
        (
            "the ratio is of the window",
            "return self.hidden_ns / self.comm_ns if self.comm_ns else None",
            "return self.hidden_ns / self.window_ns if self.comm_ns else None",
        ),
        (
            "without communication the ratio is 0",
            "self.hidden_ns / self.comm_ns if self.comm_ns else None",
            "self.hidden_ns / self.comm_ns if self.comm_ns else 0.0",
        ),
        (
            "overlap over compute is of the window",
            "return self.hidden_ns / self.compute_ns if",
            "return self.hidden_ns / self.window_ns if",
        ),
        (
            "overlap over compute is of all communication",
            "return self.hidden_ns / self.compute_ns if",
            "return self.comm_ns / self.compute_ns if",
        ),
        (
            "the exposed share is of the communication",
            "return self.exposed_ns / self.window_ns if self.window_ns else None",
            "return self.exposed_ns / self.comm_ns if self.comm_ns else None",
        ),
        (
            "concurrency is of the busy time only",
            '"mean": lanes_ns / self.window_ns if',
            '"mean": lanes_ns / (self.window_ns - self.idle_ns or 1) if',
        ),
        (
            "concurrency leaves collectives out",
            "        lanes_ns += sum(part.total_ns for part in self.kinds.values())\n",
            "",
        ),
        (
            "concurrency leaves copies out",
            "(self.copy_ns or 0) + (self.aux_ns or 0)\n        lanes_ns +=",
            "(self.aux_ns or 0)\n        lanes_ns +=",
        ),
        ("the most lanes at once are the least", "float(max((_active(", "float(min((_active("),
        (
            "stalls count as computing",
            "return ran if stalls is None else algebra.subtract(ran, algebra.lane(stalls, window))",
            "return ran",
        ),
        (
            "an optimizer that waits is working",
            "lanes[AUX] = _working(algebra, window, aux, stalls)",
            "lanes[AUX] = _working(algebra, window, aux, None)",
        ),
        (
            "copies are idle time",
            "algebra.union([communication, lanes[COMPUTE], lanes[COPY], lanes[AUX]])",
            "algebra.union([communication, lanes[COMPUTE], lanes[AUX]])",
        ),
        (
            "the optimizer is idle time",
            "algebra.union([communication, lanes[COMPUTE], lanes[COPY], lanes[AUX]])",
            "algebra.union([communication, lanes[COMPUTE], lanes[COPY]])",
        ),
        (
            "a bubble is idle time",
            "algebra.union([everything, lanes[BUBBLE]])",
            "algebra.union([everything])",
        ),
        (
            "what is computed in a bubble is one",
            "algebra.subtract(algebra.intersect(lane(bubbles), lane(pipeline)), lanes[COMPUTE])",
            "algebra.intersect(lane(bubbles), lane(pipeline))",
        ),
        (
            "waits outside of the pipeline are bubbles",
            "algebra.subtract(algebra.intersect(lane(bubbles), lane(pipeline)), lanes[COMPUTE])",
            "algebra.subtract(lane(bubbles), lanes[COMPUTE])",
        ),
        (
            "copies that were not observed are 0",
            "copy_ns=None if copy is None else total(lanes[COPY])",
            "copy_ns=total(lanes[COPY])",
        ),
        (
            "stalls outside of the window count",
            "stall_ns=None if stalls is None else total(lane(stalls))",
            "stall_ns=None if stalls is None else total(algebra.union([lane(stalls), nothing])) + 1",
        ),
        (
            "a kind is hidden by all of itself",
            "KindOverlap(total(lanes[kind]), total(common(lanes[kind], lanes[COMPUTE])))",
            "KindOverlap(total(lanes[kind]), total(lanes[kind]))",
        ),
        (
            "a kind of collective that nobody knows is taken",
            "    if unknown := comm.keys() - set(KINDS):\n",
            "    if (unknown := comm.keys() - set(KINDS)) and False:\n",
        ),
        ("unseen compute is shown", '(set() if unseen.compute else {"compute_ms"})', '{"compute_ms"}'),
        (
            "the exposed part of a kind is all of it",
            "(part.total_ns - part.hidden_ns) / NS_PER_MS",
            "part.total_ns / NS_PER_MS",
        ),
        ("a null ratio has no reason", '        if values["overlap_ratio"] is None:\n', "        if False:\n"),
        (
            "unseen communication is 0 in the lanes",
            "unknown = set(KINDS) if unseen is not None or self.unknown_kind_ns else set[str]()",
            "unknown = set[str]()",
        ),
    ),
    *rules(
        "aorta.timeline.columns",
        _ARRAYS,
        (
            "lanes of columns are not merged",
            "return arrays.merge(arrays.clip(raw, window))",
            "return arrays.clip(raw, window)",
        ),
        (
            "merged lanes are not cut to the window",
            "    arrays.cut, arrays.union",
            "    lambda merged, _window: merged, arrays.union",
        ),
    ),
    *rules(
        "aorta.timeline.intervals",
        _OVERLAP,
        (
            "a lane that ends where another begins flips both",
            "edges[start] = edges.get(start, 0) ^ mask",
            "edges[start] = mask",
        ),
        ("the last tile is missing", "    if window[1] > begun:\n", "    if False:\n"),
    ),
    *rules(
        "aorta.timeline.overlap",
        _ARRAYS,
        (
            "communication of unknown kind does not count",
            "for name in (*comm, UNKNOWN_KIND) if name in lanes",
            "for name in comm if name in lanes",
        ),
        (
            "kinds are known beside communication of unknown kind",
            "if name not in of_all_kinds] if self.unknown_kind_ns else []",
            "if name not in of_all_kinds] if False else []",
        ),
    ),
    *rules(
        "aorta.timeline.arrays",
        _ARRAYS,
        (
            "tiles of the same lanes are not joined",
            "changed = np.concatenate(([True], masks[1:] != masks[:-1]))",
            "changed = np.ones(len(masks), bool)",
        ),
        equivalent="a merged lane does not begin and end in one moment, so the lanes of neighbouring tiles always differ",
    ),
    *rules(
        "aorta.streams.concurrency",
        ("tests/streams/test_concurrency.py",),
        ("idle time counts as time in which kernels ran", "measure(merge(kernels))", "elapsed_ns(kernels)"),
        ("kernels that abut count as running at once", "max(end - RESOLUTION_NS, begin + 1)", "end"),
        ("a knee is the number of the highest gain", "gains[n] * (1 + tolerance)", "gains[n]"),
        ("a dip is a knee", "for m in ordered if m > n)", "for m in ordered[ordered.index(n) + 1 :][:1])"),
    ),
)
