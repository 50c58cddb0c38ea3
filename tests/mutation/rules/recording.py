"""Rules of what a run records, of reading it back, and of what a configuration may ask for."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import rules

_READING = ("tests/instrument/test_reading.py",)
_STALLS = ("tests/instrument/test_stalls.py",)
_HANDLES = ("tests/instrument/test_dispatcher.py",)
_RECORDS = ("tests/records/test_reader.py", "tests/records/test_schema_1.py", "tests/records/test_run_files.py")
_PROFILING = ("tests/config/test_profiling.py",)

RECORDING: Final = (
    *rules(
        "aorta.instrument.cpu_interceptor",
        _STALLS,
        (
            "a call that blocks is not told",
            "            self._on_call(issued.issue_ns, returned_ns)\n",
            "            pass\n",
        ),
        (
            "a call that blocks is told from its return on",
            "self._on_call(issued.issue_ns, returned_ns)",
            "self._on_call(returned_ns, returned_ns)",
        ),
        (
            "short calls are told as well",
            "- issued.issue_ns > self._shortest_call_ns:",
            "- issued.issue_ns >= self._shortest_call_ns:",
        ),
        ("a wait for what has ended is a stall", "not issued.look(), False\n", "issued.look() or True, False\n"),
        ("a wait is no stall", "perf_counter_ns(), blocked, over)", "perf_counter_ns(), False, over)"),
        (
            "a wait that fails is the end",
            '            outcome = inner()\n            issued.stamp("wait")',
            '            issued.stamp("wait")\n            outcome = inner()',
        ),
        (
            "a synchronous collective has no end",
            '            issued.stamp("wait")\n            if issued.end',
            "            if issued.end",
        ),
    ),
    *rules(
        "aorta.instrument.timed_work",
        _HANDLES,
        ("a handle goes after its first wait", "            if self._waiters <= 0:\n", "            if True:\n"),
        (
            "a handle stays for one more wait",
            "            if self._waiters <= 0:\n",
            "            if self._waiters < 0:\n",
        ),
        ("the backend is waited for each time", "if self._repeatable or not self._waited:", "if True:"),
        ("a device's wait is not repeated", "if self._repeatable or not self._waited:", "if not self._waited:"),
        ("handles are not kept", "        self._full[id(work)] = work\n", ""),
        ("a handle whose wait moves data lets go of the work", "        if self._in_place:\n", "        if True:\n"),
        (
            "handles that have completed are kept for ever",
            "            if len(self._completed) > self._capacity:\n",
            "            if False:\n",
        ),
        (
            "handles that have not completed go",
            "            if not oldest.is_completed():\n                return\n",
            "",
        ),
    ),
    *rules(
        "aorta.instrument.compute_ranges",
        ("tests/instrument/test_compute.py",),
        (
            "a block ends with the first gradient of its inputs",
            "        if left[0] == 0:\n",
            "        if left[0] >= 0:\n",
        ),
        (
            "a block of two inputs ends with the first gradient",
            "closes = last_gradient if len(inputs) == 1 else _last_of(len(inputs), last_gradient)",
            "closes = last_gradient",
        ),
        (
            "inputs by keyword do not count",
            "                inputs += needing_gradient(kwargs)\n",
            "                pass\n",
        ),
        (
            "a block without input gradients stays open",
            "            open_range.end = self._clock.mark()  # one mark each",
            "            pass  # one mark each",
        ),
    ),
    *rules(
        "aorta.instrument.step_builder",
        ("tests/instrument/test_stall_cutoff.py",),
        ("a call as long as the cut-off is a stall", "if end - begin > cutoff_ns]", "if end - begin >= cutoff_ns]"),
        ("every call of the backend is a stall", "if end - begin > cutoff_ns]", "]"),
        (
            "the cut-off of the host does not matter",
            "(self._stall_cutoff_ns or STALL_CUTOFF_NS) * factor",
            "STALL_CUTOFF_NS * 1.25 * factor",
        ),
        (
            "the ratio is told at the cut-off only",
            "(self._stall_cutoff_ns or STALL_CUTOFF_NS) * factor",
            "(self._stall_cutoff_ns or STALL_CUTOFF_NS)",
        ),
    ),
    *rules(
        "aorta.instrument.step_marks",
        _READING,
        (
            "what reaches into the next step is forgotten",
            "self._spilling = [one for one in communicated if one.possible[1] > window[1]]",
            "self._spilling = []",
        ),
        (
            "a tail with a wait inside counts whole",
            "if not any(tail.start_ns <= begin <= tail.end_ns for begin in begun)",
            "if True",
        ),
    ),
    *rules(
        "aorta.instrument.step_marks",
        _READING,
        ("a late end makes way for an earlier one", "max(free_at_ns, end_ns)", "end_ns"),
    ),
    *rules(
        "aorta.instrument.step_builder",
        _READING,
        ("more seen than issued is complete", "        elif issued != seen:\n", "        elif issued > seen:\n"),
        ("more issued than seen is complete", "        elif issued != seen:\n", "        elif issued < seen:\n"),
        (
            "collectives that the backend does not count are compared",
            "seen = sum(issued.counted for issued in step.collectives)",
            "seen = len(step.collectives)",
        ),
        (
            "a backend that keeps no count has seen all",
            "            if after is None or before is None:\n                return None\n",
            "            if after is None or before is None:\n                continue\n",
        ),
        (
            "a backward tail is a stall everywhere",
            "algebra.intersect(algebra.lane(maybe, window), everywhere)",
            "algebra.lane(maybe, window)",
        ),
        (
            "a loss that is not finite has no reason",
            "            elif not math.isfinite(value):\n",
            "            elif False:\n",
        ),
        (
            "a captured collective is complete",
            "        if step.captured:\n            reason",
            "        if False:\n            reason",
        ),
    ),
    *rules(
        "aorta.records.reader",
        _RECORDS,
        (
            "a torn last line is a line",
            '                if not text.endswith(b"\\n"):\n                    problems.add(number, "cut off in mid-line")\n                    return\n',
            "",
        ),
        ("a line may have any length", "                if len(text) > LINE_LIMIT:\n", "                if False:\n"),
        (
            "a record without a footer is a whole one",
            "    if record.footer is None:\n        record.problems.append",
            "    if False:\n        record.problems.append",
        ),
        (
            "a second header is passed over",
            "                raise second_header(path, number, line)\n",
            "                pass\n",
        ),
        ("every schema is read", "    if version not in READABLE_VERSIONS:\n", "    if False:\n"),
        (
            "steps of a baseline are training",
            "            case Step():\n                record.isolated.append(line)",
            "            case Step():\n                record.steps.append(line)",
        ),
        ("problems are not counted beyond those that are shown", "            self.more += 1\n", "            pass\n"),
        (
            "lanes of schema 1 are those of today",
            "return msgspec.structs.replace(line, lanes=_STREAMS_DECODER.decode(text).streams)",
            "return line",
        ),
    ),
    *rules(
        "aorta.records.run_files",
        _RECORDS,
        (
            "records are listed by name",
            "sorted((int(match[1]), path) for match, path in named if match and path.is_file())",
            "sorted((match[0], path) for match, path in named if match and path.is_file())",
        ),
        ("a folder may be a record", "if match and path.is_file())", "if match)"),
    ),
    *rules(
        "aorta.config.mesh",
        ("tests/config/test_mesh.py",),
        (
            "ranks that compute a layer together have batches of their own",
            "            return world_size // tp_size\n",
            "            return world_size\n",
        ),
        (
            "tensor parallelism has a batch a rank",
            "        case TP() | PP() | CP():\n            return 1\n",
            "        case TP() | PP() | CP():\n            return world_size\n",
        ),
        (
            "ranks that share sequences have batches of their own",
            "            return world_size // cp_size\n",
            "            return world_size\n",
        ),
        ("sequences need not divide", "        if length % (2 * parts):\n", "        if length < 2 * parts:\n"),
        ("each rank has one chunk", "        if length % (2 * parts):\n", "        if length % parts:\n"),
        (
            "pipelines beside each other share a batch",
            "            return world_size // pp_size\n",
            "            return 1\n",
        ),
        (
            "ranks that follow one another are a pipeline",
            "    place = rank // (world_size // ranks)\n",
            "    place = rank % ranks\n",
        ),
        ("any number of ranks fills the mesh", "    if world_size % parts:\n", "    if False:\n"),
        (
            "layers need not divide",
            "            if value % parts:\n",
            "            if value < parts:\n",
        ),
    ),
    *rules(
        "aorta.parallel.context",
        ("tests/parallel/test_context.py",),
        (
            "the second chunk is the next one",
            "(chunks[rank], chunks[-1 - rank])",
            "(chunks[2 * rank], chunks[2 * rank + 1])",
        ),
        ("late chunks are in the order of the ranks", "*reversed(late.unbind())", "*late.unbind()"),
        ("a chunk sees what is behind it", "[(index + 1) * chunks[0]", "[(index + 2) * chunks[0]"),
        (
            "positions count from 0 on every rank",
            "own_chunks(positions_S, 0, rank, ranks)), own",
            "positions_S[: len(positions_S) // ranks]), own",
        ),
    ),
    *rules(
        "aorta.workload.gpt",
        ("tests/workload/test_gpt.py",),
        ("fewer queries are those of the first positions", ".tril(keys - queries)", ".tril(0)"),
    ),
    *rules(
        "aorta.config.rank_words",
        _PROFILING,
        ("a negative rank is a rank", "not (text.isascii() and text.isdigit())", "not text.lstrip('-').isdigit()"),
        (
            "all is no rank",
            '        if text == "all":\n            return None\n',
            '        if text == "all":\n            return frozenset()\n',
        ),
    ),
    *rules(
        "aorta.config.rules.profiling_rules",
        _PROFILING,
        (
            "a period may be shorter than its cycle",
            "profiling.wait is None and profiling.period < cycle:",
            "profiling.wait is None and profiling.period < 0:",
        ),
        (
            "a period of its cycle is too short",
            "profiling.wait is None and profiling.period < cycle:",
            "profiling.wait is None and profiling.period <= cycle:",
        ),
        (
            "period and wait may disagree",
            "if profiling.wait is not None and profiling.period != profiling.wait + cycle:",
            "if False:",
        ),
        (
            "several ranks may write one file",
            "if several and not broken and not tells_ranks_apart(",
            "if False and not tells_ranks_apart(",
        ),
        ("names may leave their folder", '(".." in template.split("/") or (', "(False or ("),
        ("every trace may be lost", "    if keep == 0 and profiling.enabled and", "    if False and"),
        ("an address may hold a password", "_has_password(address):\n            yield", "False:\n            yield"),
    ),
    *rules(
        "aorta.config.rules.fabric_rules",
        ("tests/config/test_fabric_rules.py",),
        ("a jitter of 1 is taken", "if not 0 <= fabric.jitter < 1:", "if not 0 <= fabric.jitter <= 1:"),
        (
            "a link may have no bandwidth",
            "if not 0 < (value := getattr(fabric, name)) < math.inf:",
            "if not 0 <= (value := getattr(fabric, name)) < math.inf:",
        ),
        (
            "the straggler may be a rank that there is not",
            "not 0 <= fabric.straggler_rank < world_size:",
            "not 0 <= fabric.straggler_rank <= world_size:",
        ),
        (
            "a straggler may be nobody",
            "    if fabric.straggler_rank is None and fabric.straggler_ms != 0:\n",
            "    if False:\n",
        ),
        (
            "the emulated world may be smaller than the real one",
            "fabric.emulated_world_size < world_size:",
            "fabric.emulated_world_size < 0:",
        ),
        ("a range of bytes may be empty", "if low is not None and high is not None and low > high:", "if False:"),
    ),
    *rules(
        "aorta.config.templates",
        _PROFILING,
        (
            "a local rank alone tells ranks apart",
            'return "rank" in names or {"local_rank", "node_rank"} <= names',
            'return "rank" in names or "local_rank" in names',
        ),
        (
            "a variable that there is not is taken",
            "        if unknown:\n            return f",
            "        if False:\n            return f",
        ),
    ),
)
