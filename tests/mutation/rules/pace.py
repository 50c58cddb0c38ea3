"""Rules of what the marks of a step can bear, where the host sets the pace as well, and of steps measured by kernels."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import rules

_PACE = ("tests/instrument/test_device_pace.py",)
_WINDOW = ("tests/instrument/test_window_kernels.py",)
_MARKS = ("tests/instrument/test_step_marks.py", "tests/instrument/test_reading.py", *_WINDOW)

PACE: Final = (
    *rules(
        "aorta.instrument.device_pace",
        _PACE,
        ("what a launch takes does not vary", "self._slack_ns = 2 * bound_ns", "self._slack_ns = bound_ns"),
        ("a launch reaches the device at once", "self._slack_ns = 2 * bound_ns", "self._slack_ns = 0"),
        ("a mark takes no time until two have followed", "self._mark_ns = _LONGEST_MARK_NS", "self._mark_ns = 0"),
        ("marks of the step before cut blocks", "        self._points.clear()\n", ""),
        ("marks are in the order in which they are read", "        self._points.sort()\n", ""),
        ("a mark takes as long as the longest time between two", "min(self._mark_ns, at", "max(self._mark_ns, at"),
        (
            "blocks of a host that is ahead hold no marks",
            "<= stretch.start_ns and not self._mark_ns:",
            "<= stretch.start_ns:",
        ),
        ("marks before a block cut it", "bisect.bisect_right(self._points, (stretch.start_ns, stretch.sent_ns))", "0"),
        ("marks behind a block cut it", "bisect.bisect_left(self._points, (stretch.end_ns, 0))", "None"),
        ("marks inside a block do not cut it", "(*self._points[first:last], (stretch", "(*self._points[:0], (stretch"),
        ("each stretch begins with the block", "            start_ns = at_ns\n", ""),
        (
            "the device is behind as soon as it comes by later",
            "stretch.sent_ns is None or stretch.sent_ns + self._slack_ns < stretch.end_ns",
            "stretch.sent_ns is None or stretch.sent_ns < stretch.end_ns",
        ),
        (
            "what is launched late was running before",
            "max(stretch.start_ns + self.marks_ns(begins_late), ",
            "min(stretch.start_ns + self.marks_ns(begins_late), ",
        ),
        ("nothing is written before it begins", "stretch.start_ns + self.marks_ns(begins_late)", "stretch.start_ns"),
        ("nothing is written behind its end", "stretch.end_ns - self.marks_ns(ends_early)", "stretch.end_ns"),
        (
            "a launch is seen when it is recorded",
            "begins_late), stretch.sent_ns + self._slack_ns)",
            "begins_late), stretch.sent_ns)",
        ),
        (
            "the lead is that of the beginning of a block",
            "stretch.end_ns - stretch.sent_ns for",
            "stretch.start_ns - stretch.sent_ns for",
        ),
        ("the longest lead stands for all", "return median(leads)", "return max(leads)"),
        ("the tolerance is a tenth of a step", "_NEGLIGIBLE = DECIDED / 10", "_NEGLIGIBLE = 0.1"),
        (
            "what is open is compared with stalls as well",
            "for length in lengths[:2] if length",
            "for length in lengths if length",
        ),
        (
            "where nothing communicates all has to be known",
            "for length in lengths[:2] if length), default",
            "for length in lengths[:2]), default",
        ),
    ),
    *rules(
        "aorta.instrument.step_marks",
        _MARKS,
        ("a collective's own marks take no time", "_ROUND_A_COLLECTIVE = (1, 2)", "_ROUND_A_COLLECTIVE = (0, 0)"),
        (
            "the backend has no event behind a collective",
            "_ROUND_A_COLLECTIVE = (1, 2)",
            "_ROUND_A_COLLECTIVE = (1, 1)",
        ),
        ("the pace of the step before goes on", "        self.pace.begin()\n", ""),
        ("how long a mark takes is not found out", "        self.pace.measured()\n", ""),
        (
            "marks of the compute stream say nothing of its pace",
            "            self.pace.passed(at_ns, sent_ns)\n",
            "            pass\n",
        ),
        (
            "a collective certainly ran from mark to mark",
            "certain = self.pace.one(Stretch(start_ns, end_ns, sent_ns), *_ROUND_A_COLLECTIVE)",
            "certain = [(start_ns, end_ns)]",
        ),
        ("collectives of the host are the device's", "certain, sent_ns is not None)", "certain, True)"),
        (
            "a collective may have begun with its turn only",
            "first_ns = self._first_ns(issued.communicator, marked_ns, start_ns, Stretch(start_ns, end_ns, sent_ns))",
            "first_ns = start_ns",
        ),
        (
            "a collective may always have begun with its mark",
            "return marked_ns if before_was_late else",
            "return marked_ns if True else",
        ),
        ("an end mark is never late", "return marked_ns if before_was_late else", "return marked_ns if False else"),
        (
            "an end mark is late where the device is behind",
            "(self._late.discard if self.pace.is_behind(stretch) else self._late.add)",
            "(self._late.add if self.pace.is_behind(stretch) else self._late.discard)",
        ),
        ("the end mark before takes no time", "start_ns - self.pace.marks_ns(_ROUND_A_COLLECTIVE[1]))", "start_ns)"),
        (
            "a collective begins behind its end",
            "return min(max(start_ns, before_ns), end_ns)",
            "return max(start_ns, before_ns)",
        ),
        ("a launch waits for itself", "if launch is None or launch != before_launch:", "if True:"),
        (
            "a copy of another stream is one of the stream that computes",
            "        if not copied.computes:\n",
            "        if False:\n",
        ),
        ("copies cut no block", "*(between for _, between in copies if between is not None)]", "]"),
        ("waits for handles cut no block", "*(stretch for _, stretch in waits), *(between", "*(between"),
        (
            "a wait that goes on was for its collective",
            "for wait, stretch in waits if wait.over]",
            "for wait, stretch in waits]",
        ),
        ("every wait blocks", "for wait, stretch in waits if wait.blocked)]", "for wait, stretch in waits)]"),
        (
            "marks of one's own are read for a range without an end",
            "if low is not None and high is not None]\n\n    def stretch",
            "if low is not None]\n\n    def stretch",
        ),
    ),
    *rules(
        "aorta.instrument.window_kernels",
        _WINDOW,
        (
            "kernels behind a step are in its blocks",
            "intervals.merge(intervals.clip([(low, high) for _, _, low, high in marked.passes], window))",
            "intervals.merge([(low, high) for _, _, low, high in marked.passes])",
        ),
        (
            "communication of later steps is this one's",
            "if kernel.start_ns < window[1] and kernel.end_ns > window[0]]",
            "if kernel.end_ns > window[0]]",
        ),
        (
            "communication of earlier steps is this one's",
            "if kernel.start_ns < window[1] and kernel.end_ns > window[0]]",
            "if kernel.start_ns < window[1]]",
        ),
        ("a collective without a kernel is nothing", "        if missing:\n", "        if False:\n"),
        ("collectives that may have taken no time need a kernel", " and one.possible[0] < one.possible[1]]", "]"),
        ("collectives of the host need a kernel", "if one.on_device and one.possible[0]", "if one.possible[0]"),
        ("collectives of the host are left out", "            if not one.on_device:\n", "            if False:\n"),
        ("blocks without a kernel computed nothing", "        if ranges and not compute:\n", "        if False:\n"),
        ("a step without blocks misses a kernel", "        if ranges and not compute:\n", "        if not compute:\n"),
        ("a kernel is of the kind that it shares least with", "most, kind = max(shared", "most, kind = min(shared"),
        (
            "communication that no mark tells is some collective's",
            "(kinds[kind] if most else unknown).append(span)",
            "(kinds[kind] if kind else unknown).append(span)",
        ),
        (
            "a step whose kernels failed is read without them",
            "if self.problem is not None and not self._compute and not self._comm:",
            "if False:",
        ),
        (
            "one missing kernel takes the other steps' away",
            "if self.problem is not None and not self._compute and not self._comm:",
            "if self.problem is not None:",
        ),
        (
            "kernels of all streams compute",
            "for kernel in self._compute if kernel.stream == self._stream]",
            "for kernel in self._compute]",
        ),
        (
            "the stream with most kernels anywhere computes",
            "intervals.measure(intervals.clip(ranges, (kernel.start_ns, kernel.end_ns)))",
            "kernel.end_ns - kernel.start_ns",
        ),
        (
            "the stream that computes is asked for in each step",
            "        if self._stream is None:\n",
            "        if True:\n",
        ),
        (
            "kernels outside of blocks compute",
            "return intervals.intersect(intervals.merge(spans), ranges)",
            "return intervals.merge(spans)",
        ),
        ("steps are not counted", "        found.steps += 1\n", ""),
        (
            "what kernels hide is what marks hide",
            "found.hidden_ns += by_kernels.hidden_ns",
            "found.hidden_ns += int(by_marks.hidden_ns)",
        ),
        (
            "what marks leave open is exposed",
            'by_marks.bounds.get("exposed_comm_ms", (by_marks.exposed_ns / 1e6,))[0] * 1e6',
            "by_marks.exposed_ns",
        ),
        (
            "stalls are a part of a block",
            "intervals.subtract(intervals.merge([(low, high)]), stalls)",
            "intervals.merge([(low, high)])",
        ),
        (
            "a block of which kernels ran anywhere ran",
            "share + intervals.measure(intervals.intersect(ran, busy))",
            "share + intervals.measure(ran)",
        ),
        ("only the last range of a block counts", "found.blocks.get((block, phase), (0, 0))", "(0, 0)"),
        (
            "a step is read before the profiler has stopped",
            "        self.known = False\n",
            "        self.known = True\n",
        ),
    ),
)
