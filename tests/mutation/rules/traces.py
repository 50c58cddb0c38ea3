"""Rules of attribution, of clocks and merging, and of what is work, communication and a step in a trace."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import rules

_ASSIGN = ("tests/analysis/attribution/test_assign_exposed.py",)
_ATTRIBUTE = ("tests/analysis/attribution/test_attribute.py",)
_OFFSETS = ("tests/records/test_clock_offsets.py",)
_TRACKS = ("tests/analysis/merge/test_tracks.py",)
_MERGE = ("tests/analysis/merge/test_merge_traces.py",)
_NAMES = ("tests/analysis/load/test_kernel_classifier.py", "tests/analysis/load/test_kineto_collectives.py")
_KINETO = (
    "tests/analysis/load/test_kineto.py",
    "tests/analysis/load/test_kineto_collectives.py",
    "tests/analysis/load/test_microseconds.py",
)
_HOST = ("tests/analysis/load/test_host_operators.py", "tests/analysis/load/test_kineto_collectives.py")
_STEPS = ("tests/analysis/load/test_step_markers.py",)

TRACES: Final = (
    *rules(
        "aorta.analysis.attribution.accumulate",
        _ASSIGN,
        (
            "one that outlasts the stretch is waited for like any other",
            "live, key=lambda row: row.end > stretch[1]",
            "live, key=lambda row: row.start",
        ),
        (
            "one that ends with the stretch outlasts it",
            "key=lambda row: row.end > stretch[1]",
            "key=lambda row: row.end >= stretch[1]",
        ),
        ("a nanosecond is assigned to each in flight", "                left = subtract(left, span)\n", ""),
        (
            "a rank transfers first and waits then",
            "waiting = [(row.start, row.start + row.wait_ns)]",
            "waiting = [(row.end - row.wait_ns, row.end)]",
        ),
        (
            "an unknown wait is transfer",
            "            yield UNKNOWN_PART, rest\n",
            "            yield TRANSFER, rest\n",
        ),
        ("a wait of 0 is not known", "    if row.wait_ns < 0:\n", "    if row.wait_ns <= 0:\n"),
    ),
    *rules(
        "aorta.analysis.attribution.accumulate",
        _ASSIGN,
        ("what brings belongs to the range before", "if kind in BRINGING else", "if kind not in BRINGING else"),
        ("an all-gather takes away", 'frozenset({"allgather", "broadcast"', 'frozenset({"broadcast"'),
        (
            "the outermost range counts",
            "(-known[coming][0], coming, known[coming][1])",
            "(known[coming][0], coming, known[coming][1])",
        ),
        (
            "an ended range still counts",
            "        while active and active[0][2] <= at:\n            heapq.heappop(active)\n",
            "",
        ),
        ("ranges reach over the window", "(max(start, window[0]), min(end, window[1]), place)", "(start, end, place)"),
        (
            "the tail of the window has no tile",
            "    if at < window[1]:\n        found.append",
            "    if False:\n        found.append",
        ),
        (
            "the nearest range before is the first",
            "        nearest = place or nearest\n    return found",
            "        nearest = nearest or place\n    return found",
        ),
    ),
    *rules(
        "aorta.analysis.attribution.accumulate",
        _ATTRIBUTE,
        (
            "what reaches into the next step is forgotten",
            "spilling = [row for row in rows if row.end > step.window[1]]",
            "spilling = []",
        ),
        (
            "what the rows do not explain is dropped",
            "    if missing := step.exposed_ns - measure(lanes.exposed):\n",
            "    if (missing := step.exposed_ns - measure(lanes.exposed)) and False:\n",
        ),
        (
            "rows that explain too much stand as they are",
            "    if missing := step.exposed_ns - measure(lanes.exposed):\n",
            "    if (missing := step.exposed_ns - measure(lanes.exposed)) > 0:\n",
        ),
        ("warm-up counts", "        if not step.used:\n            continue\n", ""),
        ("steps that are left out are not counted", "            found.sums.left_out += 1\n", ""),
        ("stalls count as computing", "step.compute, step.stalls)", "step.compute, [])"),
        (
            "the record's communication is measured again",
            "step.comm_ns if step.comm_ns >= 0 else measure(lanes.comm)",
            "measure(lanes.comm)",
        ),
    ),
    *rules(
        "aorta.analysis.attribution.breakdown",
        _ATTRIBUTE,
        ("means are sums", "return total_ns / side_totals.sums.rank_steps / NS_PER_MS", "return total_ns / NS_PER_MS"),
        (
            "rows beyond the shown are lost",
            "sums = [sum(row[name] for row in rest)",
            "sums = [sum(row[name] for row in rest[1:])",
        ),
        (
            "shares are of the candidate",
            "(right - left) / total if total else None",
            "right / total if total else None",
        ),
        (
            "hidden communication adds to what is exposed",
            "-before.hidden_ns, -after.hidden_ns",
            "before.hidden_ns, after.hidden_ns",
        ),
    ),
    *rules(
        "aorta.analysis.attribution.accumulate",
        _ATTRIBUTE,
        (
            "the order within a step counts over groups",
            "orders[kind, group], wait))\n        orders[kind, group] += 1",
            "orders[kind, group], wait))\n        orders[kind, group] += 2",
        ),
        ("a collective without an end is one at the clock's origin", "if NO_TIME not in (start, end):", "if True:"),
    ),
    *rules(
        "aorta.records.clock_offsets",
        _OFFSETS,
        ("drift is not taken off", " - round(self._slope * (own_ns - sample.at_ns))", ""),
        ("the offset is added", "return own_ns - sample.offset_ns - ", "return own_ns + sample.offset_ns - "),
        (
            "bounds are not weighted by distance",
            "round(abs(1 - weight) * self.start.bound_ns + abs(weight) * self.end.bound_ns)",
            "max(self.start.bound_ns, self.end.bound_ns)",
        ),
        (
            "the bound shrinks before the first measurement",
            "abs(1 - weight) * self.start.bound_ns + abs(weight)",
            "abs(1 - weight) * self.start.bound_ns + weight",
        ),
        (
            "the bound shrinks behind the last measurement",
            "round(abs(1 - weight) * self.start",
            "round((1 - weight) * self.start",
        ),
        (
            "the bound of the drift is that of one end",
            "Fraction(self.start.bound_ns + self.end.bound_ns, self.end.at_ns",
            "Fraction(self.end.bound_ns, self.end.at_ns",
        ),
        (
            "a clock that was measured once has a bound of 0",
            "        if self.start is None or self.end is None or self.end.at_ns <= self.start.at_ns:\n            return None\n        weight",
            "        if self.start is None or self.end is None or self.end.at_ns <= self.start.at_ns:\n            return 0\n        weight",
        ),
        (
            "the worst bound is the better one",
            "return max(self.start.bound_ns, self.end.bound_ns)",
            "return min(self.start.bound_ns, self.end.bound_ns)",
        ),
        ("a file of another version is read", "    if sync.version != CLOCK_SYNC_VERSION:\n", "    if False:\n"),
    ),
    *rules(
        "aorta.records.clocks",
        (*_TRACKS, "tests/records"),
        (
            "a clock that was set holds until the next reading",
            "        if 0 < after < len(self._readings):\n",
            "        if False:\n",
        ),
        ("the uncertainty is that of the best reading", "self.uncertainty_ns = max(", "self.uncertainty_ns = min("),
    ),
    *rules(
        "aorta.analysis.merge.causality",
        ("tests/analysis/merge/test_causality.py", *_TRACKS),
        (
            "bounds do not add up",
            "allowed = sum(bound or 0 for bound in known)",
            "allowed = max((bound or 0 for bound in known), default=0)",
        ),
        ("bounds explain nothing", "allowed = sum(bound or 0 for bound in known)", "allowed = 0"),
        ("a lead of the bound is a violation", "        if lead_ns > allowed:\n", "        if lead_ns >= allowed:\n"),
        (
            "the worst lead is the last",
            "lead_ns if self.worst_lead_ns is None else max(self.worst_lead_ns, lead_ns)",
            "lead_ns",
        ),
        ("unknown bounds are not counted", "        self.unknown_bounds += None in known\n", ""),
        (
            "the cause is the first to issue",
            "_, cause = max((row.issue_ns, rank)",
            "_, cause = min((row.issue_ns, rank)",
        ),
        ("kinds that end early are checked", "            if row.kind not in LOCKSTEP:\n", "            if False:\n"),
        ("collectives that a rank lacks are checked", "        if not complete[number]:\n", "        if False:\n"),
    ),
    *rules(
        "aorta.analysis.merge.tracks",
        _TRACKS,
        (
            "the anchors' uncertainty is left out",
            "return None if clocks is None else clocks + wall.uncertainty_ns",
            "return clocks",
        ),
        (
            "steps beside the trace are drawn",
            "        if end < self.span_ns[0] or begin > self.span_ns[1]:\n            return\n",
            "",
        ),
        ("collectives that overlap share a thread", "            if until <= begin:\n", "            if True:\n"),
        (
            "segments that differ in other lanes split a lane",
            "if begin is not None and segment.start_ns != end:",
            "if begin is not None:",
        ),
    ),
    *rules(
        "aorta.analysis.merge.alignment",
        _MERGE,
        (
            "ends are not corrected",
            'end = self.to_reference(begin + microseconds.of_value(bytes(event["dur"])))',
            'end = moved + microseconds.of_value(bytes(event["dur"]))',
        ),
        (
            "the base of a file is left out",
            'begin = base_ns + microseconds.of_value(bytes(event["ts"]))',
            'begin = microseconds.of_value(bytes(event["ts"]))',
        ),
        ("align none corrects", 'if self.align == "none" or self._clock is None:', "if self._clock is None:"),
        (
            "start_profile corrects skew too",
            "            return shown + self.shift_ns\n",
            "            return (self._clock.to_reference(shown) if self._clock else shown) + self.shift_ns\n",
        ),
        ("traces of two runs are mixed", "    if len(runs) > 1:\n        raise", "    if False:\n        raise"),
    ),
    *rules(
        "aorta.timeline.kernel_names",
        _NAMES,
        ("HIP copies compute", '    r"__amd_rocclr_(copy|fill)",', '    r"__amd_rocclr_fill",'),
        ("kernels of RCCL compute", '    r"rccl",  # rcclGenericKernel\n', ""),
        (
            "kernels of symmetric memory compute",
            '    r"(one|two)_shot_all_reduce|multimem_all_(reduce|gather)|multimem_one_shot",',
            '    r"two_shot_all_reduce",',
        ),
    ),
    *rules(
        "aorta.analysis.load.kernel_classifier",
        _NAMES,
        (
            "communication is only what its name begins with",
            "        if self._comm.search(name):\n",
            "        if self._comm.match(name):\n",
        ),
        ("names are told apart by case", "(*COMM, *comm_patterns)), re.IGNORECASE)", "(*COMM, *comm_patterns)))"),
        (
            "a kernel without a name computes",
            "        if not name.strip():\n            return IntervalClass.UNKNOWN\n",
            "",
        ),
        ("a reduce-scatter is a scatter", '    ("reducescatter", r"(?<![a-z])reduce_?scatter"),\n', ""),
        ("an all-gather is a gather", '    ("allgather", r"(?<![a-z])all_?gather|multimem_all_gather"),\n', ""),
        (
            "patterns of the command line replace the built-in ones",
            "for part in (*COMM, *comm_patterns))",
            "for part in (comm_patterns or COMM))",
        ),
        ("a pattern that matches nothing at all is taken", '    if compiled.search(""):\n', "    if False:\n"),
    ),
    *rules(
        "aorta.analysis.load.kineto.engine_copies",
        _KINETO,
        (
            "copies to the host may be communication",
            '" not in name.lower() and _WITH_HOST.search(name) is None',
            '" not in name.lower()',
        ),
        ("fills may be communication", 'return "memset" not in name.lower() and ', "return "),
        (
            "the program's own copies are communication",
            "        if arguments is not None:\n            found[row] = arguments\n",
            "        found[row] = arguments or Arguments()\n",
        ),
        (
            "copies that nothing names are none",
            "    if not symmetric or not count:\n        return None\n",
            "    if True:\n        return None\n",
        ),
    ),
    *rules(
        "aorta.analysis.load.kineto.host_operators",
        _HOST,
        (
            "waiting for a collective is work",
            "            begin[here] = np.where(called, np.maximum(begin[here], ended[last]), begin[here])\n",
            "",
        ),
        (
            "operators that began behind a call wait for it, too",
            "(start[last] <= begin[here]) & (start[last] >= start[owner[here]])",
            "start[last] <= begin[here]",
        ),
        ("what a call copies is work", "    kept = ~waits & (begin < finish)\n", "    kept = begin < finish\n"),
        (
            "compiled code waits where it issues a functional collective",
            "        calls = calls[~_lies_in(start[calls], merge(Spans(start[explicit], end[explicit])))]\n",
            "",
        ),
        ("threads of gloo compute", "np.flatnonzero(~np.isin(thread, gloo_threads))", "np.arange(len(thread))"),
        (
            "what a hook of FSDP waits is work",
            "_NO_COMPUTE: Final = (_CALL, *_FUNCTIONAL, *HOOKS, ",
            "_NO_COMPUTE: Final = (_CALL, *_FUNCTIONAL, ",
        ),
        ("doubtful time is not said", "    if hidden - surely <= _DOUBT * length:\n", "    if True:\n"),
        ("compiled code is doubtful", " and not name.startswith(_COMPILED)", ""),
    ),
    *rules(
        "aorta.analysis.load.kineto.self_time",
        _HOST,
        (
            "of rows that begin together the shortest is the outermost",
            "np.lexsort((-rows.end[filled], rows.start[filled], thread[filled]))",
            "np.lexsort((rows.end[filled], rows.start[filled], thread[filled]))",
        ),
        (
            "a row still runs when it ends",
            'np.searchsorted(end, start, side="right")',
            'np.searchsorted(end, start, side="left")',
        ),
    ),
    *rules(
        "aorta.analysis.load.interval_table",
        _HOST,
        ("every piece of an operator is one", "    if not len(split):\n", "    if True:\n"),
    ),
    *rules(
        "aorta.analysis.load.kineto.kineto_reader",
        (*_KINETO, *_HOST, "tests/analysis/load/test_step_markers.py"),
        ("a product round another counts twice", "np.delete(order, np.flatnonzero(contains))", "order"),
        (
            "of marks of one step the last counts",
            'mine = mine[np.argsort(marks.start[mine], kind="stable")]',
            'mine = mine[np.argsort(-marks.start[mine], kind="stable")]',
        ),
        ("marks count in the order of the file", '    mine = mine[np.argsort(marks.start[mine], kind="stable")]\n', ""),
        (
            "every kind of mark counts",
            '    mine = np.flatnonzero(marks["kind"] == chosen)\n',
            '    mine = np.arange(len(marks["kind"]))\n',
        ),
        (
            "the worst kind of mark counts",
            "for kind in MARKS if kind in kinds), None)",
            "for kind in MARKS[::-1] if kind in kinds), None)",
        ),
        (
            "a copy of a collective has all its bytes",
            "    collectives.seq[moved] = collectives.bytes[moved] = NULL\n",
            "",
        ),
        ("times before our days are the wall clock", "if low >= _UNIX_FROM_NS else", "if True else"),
    ),
    *rules(
        "aorta.analysis.load.step_markers",
        _STEPS,
        (
            "of ranges of one step the last counts",
            'used = used[np.argsort(start_ns[used], kind="stable")]',
            'used = used[np.argsort(-start_ns[used], kind="stable")]',
        ),
        ("ranges count in the order of the file", '    used = used[np.argsort(start_ns[used], kind="stable")]\n', ""),
        (
            "a mark of no length is a window",
            "(numbers != NULL) & (end_ns > start_ns)",
            "(numbers != NULL) & (end_ns >= start_ns)",
        ),
        (
            "the worst family counts",
            "    for family, pattern in FAMILIES:\n",
            "    for family, pattern in FAMILIES[::-1]:\n",
        ),
        (
            "a marker may stand anywhere in a text",
            r'rf"^{re.escape(mark)}(\d{{1,18}})$"',
            r'rf".*{re.escape(mark)}(\d{{1,18}})"',
        ),
    ),
)
