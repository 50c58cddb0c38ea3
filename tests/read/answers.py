"""What a report says of traces or records, and whether that is right by what it says of healthy ones (`judge`)."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.cautions import alerts
from aorta.analysis.findings import RULES
from aorta.documents import ABSENT, known
from aorta.documents.metrics import JOB_STEP
from aorta.errors import InputError
from aorta.read.record import load_run
from aorta.read.run import Run
from aorta.read.traces.load import load_traces
from tests.read.evidence_files import write_file
from tests.read.evidence_rows import File

TOLERANCE: Final = 0.02
CUT: Final = ("cut ", "kernels and calls of the first third")
"""How mutations begin that leave a recording of a part of the job: the whole of it is another whole."""
MOVED: Final = "the device lags"
"""How mutations begin that move windows: how long these last, and what was idle in them, is theirs."""
_OF_WINDOWS: Final = frozenset({"idle_ms", "window_ms", "exposed_share", JOB_STEP})
_TOP: Final = ("whole", "window_ms")
"""From the first row to the last: where the outermost are lost, another window."""

Line: TypeAlias = dict[str, Any]
Records: TypeAlias = dict[str, list[Line]]
"""Name of a file -> its lines; what is no dictionary is written as it is."""


class Value(NamedTuple):
    """A number, or bounds of one; `why` is the reason of a null."""

    value: float | None
    why: str = ""


@dataclass(frozen=True)
class Answer:
    """What a report says: (window, metric) -> values of ranks and steps. Windows: `whole`, `step` and `run`."""

    values: Mapping[tuple[str, str], Sequence[Value]]
    marked: bool
    refused: str | None = None
    notes: Sequence[str] = ()


SHOWN: Final = re.compile(
    r"(compute|comm|copy|idle|window|compute_comm|exposed_comm|(compute_|exposed_)?(allreduce|allgather|reducescatter))_ms"
    r"|overlap_ratio|overlap_over_compute|exposed_share|" + JOB_STEP
)


def answer(files: Sequence[File]) -> Answer:
    """Write traces, and report on them."""
    with tempfile.TemporaryDirectory(prefix="aorta-mutant-") as folder:
        for file in files:
            write_file(file, Path(folder))
        return _reported(load_traces, folder, marked=False)


def record_answer(records: Records) -> Answer:
    """Write records, and report on them."""
    with tempfile.TemporaryDirectory(prefix="aorta-mutant-") as folder:
        for name, lines in records.items():
            (Path(folder) / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return _reported(load_run, folder, marked=True)


def _reported(load: Callable[[str], Run], folder: str, *, marked: bool) -> Answer:
    try:
        return _answer(load(folder))
    except InputError as error:
        return Answer({}, marked, str(error))


def _answer(run: Run) -> Answer:
    values: dict[tuple[str, str], list[Value]] = defaultdict(list)
    dataset = LabelledRun("mutant", run)
    entry = aggregate(dataset, matched=False)
    whole = {} if run.traces is None else run.traces.whole
    for number, window in whole.items():
        if int(number) not in run.ranks:  # a device that is in no step
            continue
        for name, value in window["metrics"].items():
            values["whole", name].append(Value(value, window["null_reasons"].get(name, "")))
    marked = any(trace.steps for trace in known(run.health.traces) or ()) or run.traces is None
    for tables in run.ranks.values():
        steps = tables.steps
        for at in range(len(steps)):
            if not steps.used[at]:
                continue
            reasons = steps.reasons[int(steps.reason[at])]
            for name, column in steps.metrics.items():
                value = None if math.isnan(column[at]) else float(column[at])
                values["step", name].append(Value(value, reasons.get(name, "")))
    for name, described in entry.metrics.items():
        why = described.reason or next(iter(described.null_reasons), "")
        values["run", name].append(Value(described.median, str(why)))
    entry.traces = ABSENT if run.traces is None else run.traces
    said = [finding.sentence for rule in RULES if run.traces for finding in rule(dataset, entry)]
    notes = [*run.health.notes, *alerts({"mutant": entry}), *said]
    return Answer({key: own for key, own in values.items() if SHOWN.fullmatch(key[1])}, marked, None, notes)


_BOUNDS: Final = re.compile(r"(between|at least|at most) ([-+.\de]+)(?: and ([-+.\de]+))?")


def _bounds(why: str) -> tuple[float, float]:
    match = _BOUNDS.search(why)
    low, high = (-math.inf, math.inf) if match is None else (float(match[2]), float(match[3] or "inf"))
    return (-math.inf, low) if match is not None and match[1] == "at most" else (low, high)


@dataclass
class Verdict:
    """`outcome`: wrong, refused, null (some number is), or same. `wrong`: what, the number, and the right ones."""

    outcome: str
    wrong: list[str] = field(default_factory=list)


def judge(right: Answer, mutant: Answer, name: str = "") -> Verdict:
    """Judge a mutant's answer by that of the healthy traces."""
    if mutant.refused is not None:
        return Verdict("refused")
    wrong, nulls = [], False
    for (window, metric), seen in mutant.values.items():
        # Where no step is marked, the whole trace is the only step.
        own = window if mutant.marked or window == "whole" or not right.marked else "whole"
        moved = name.startswith(MOVED) and metric in _OF_WINDOWS
        if (name.startswith(CUT) and window == "whole") or moved or (own, metric) == _TOP:
            continue
        if name.startswith(CUT) and own == "whole":
            continue
        true = [each.value for each in right.values.get((own, metric), ()) if each.value is not None]
        if own == "run" and mutant.marked:  # a median over fewer steps is one of theirs
            true += [each.value for each in right.values.get(("step", metric), ()) if each.value is not None]
        if not true:
            continue
        scale = 1.0 if not metric.endswith("_ms") else _scale(right, own, metric, true)
        slack = TOLERANCE * scale + _slack(right, mutant, metric, own)
        low, high = min(true) - slack, max(true) + slack
        for each in seen:
            if each.value is not None and not low <= each.value <= high:
                wrong.append(f"{window} {metric} is {each.value:.4g}, not {min(true):.4g} to {max(true):.4g}")
            if each.value is None:
                nulls = True
                least, most = _bounds(each.why)
                if least > high or most < low:
                    wrong.append(f"{window} {metric} is not {min(true):.4g} to {max(true):.4g}: {each.why}")
    return Verdict("wrong" if wrong else "null" if nulls else "same", list(dict.fromkeys(wrong)))


def _slack(right: Answer, mutant: Answer, metric: str, window: str) -> float:
    """What the whole window of a mutant, which lacks its outermost rows, changes of metrics that rest on its length."""
    if window != "whole" or metric not in _OF_WINDOWS:
        return 0.0
    longest, seen = (
        max((each.value or 0 for each in answer.values.get(_TOP, ())), default=0) for answer in (right, mutant)
    )
    return abs(longest - seen) / (longest if metric == "exposed_share" else 1)


def _scale(right: Answer, window: str, metric: str, true: Sequence[float]) -> float:
    """Parts of communication are judged by all of it, as `DECIDED` does; idle time by the window."""
    whole = {"idle_ms": "window_ms", "compute_comm_ms": "comm_ms", "exposed_comm_ms": "comm_ms"}.get(metric, metric)
    if (match := re.fullmatch(r"(?:compute|exposed)_(\w+_ms)", metric)) and whole == metric:
        whole = match[1]
    values = [each.value for each in right.values.get((window, whole), ()) if each.value is not None]
    return max([*values, *true], default=0.0)


def shares(found: Mapping[str, Verdict]) -> dict[str, int]:
    """How many mutants have each outcome."""
    return dict(Counter(each.outcome for each in found.values()))
