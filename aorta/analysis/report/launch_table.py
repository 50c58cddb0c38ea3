"""One table over many launches, for `aorta report FOLDER`: of a plan with several candidates (`aorta ab --candidate ...
--candidate ...`, `--vary`), or of a sweep (`aorta train -m`).

Each candidate is compared with the reference. With several the chance that one of them looks better grows, so the level
is shared: each is judged at alpha / candidates (Bonferroni, which holds however they depend on each other; here all
share the reference's launches). The jobs of a sweep are one launch each: values, no verdict.

Must not recommend what the comparison did not call an improvement, or leave a candidate or a job out.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.analysis.compare.verdict import Rules
from aorta.analysis.documents.comparison import SIDES, Comparison, Effect, Side
from aorta.analysis.formatting import TEXT
from aorta.analysis.load.locations import launch_folders
from aorta.analysis.locate import OUTPUTS
from aorta.analysis.metrics import JOB_STEP, metric_named
from aorta.command_line import shown_path
from aorta.errors import InputError
from aorta.records.files import decode_json, read_lines, read_small, write_whole
from aorta.redaction import shown_variables
from aorta.terminal_style import filled, paragraph, table
from aorta.version import __version__

REFERENCE, CANDIDATE = SIDES
SWEEP_FILE: Final = "sweep.jsonl"
CANDIDATES_FILE: Final = "candidates.json"
CANDIDATES_VERSION: Final = 1
_PLAN_FILE: Final = "plan.json"
_MANY: Final = 2.0
"""From three times the reference on a change is shown as a factor: +2343.7 % is 24x."""
OVERLAP: Final = "overlap_ratio"
_METRICS: Final = (JOB_STEP, OVERLAP)
_KEPT: Final = (
    *(
        "verdict",
        "verdict_reason",
        "headline",
        "numbers",
        "warnings",
        "launches",
        "launch_order",
        "left_out",
        "primary",
    ),
    *("alpha", "margin", "interval_level"),
)
"""Of a comparison, besides its metrics of step time and overlap."""


class SweptJob(msgspec.Struct, frozen=True):
    """A line of `sweep.jsonl`: a job that has ended. `reason` says why it is not done."""

    job: str
    words: list[str]
    exit_code: int
    seconds: float
    reason: str | None


def many_in(source: str) -> Path | None:
    """Return the folder of a sweep, or of a plan with several candidates, given by path or by label; None: neither."""
    for folder in (Path(source), Path(OUTPUTS, source)):
        if (folder / SWEEP_FILE).is_file() or launch_folders(folder / f"{CANDIDATE}-1"):
            return folder
    return None


def report_many(folder: Path, options: argparse.Namespace, rules: Rules) -> str:
    """Return the table of a sweep or a plan; of a plan, `candidates.json` is written too.

    Args:
        options: of `aorta report`.

    Raises:
        InputError: an option that is about two sides, a folder that cannot be read, or an output that cannot be
            written.
    """
    for name in ("fail_on", "tables", "log"):
        if getattr(options, name):
            raise InputError(
                f"--{name.replace('_', '-')}: is about one side or two, and {folder} holds many; name them, as in "
                f"aorta report --{REFERENCE} {folder / REFERENCE} --{CANDIDATE} {folder / f'{CANDIDATE}-1'}"
            )
    if (folder / SWEEP_FILE).is_file():
        return _sweep_text(folder, rules.primary)
    compared = Candidates.read(folder, rules)
    path = Path(options.output or Path("reports", folder.resolve().name)) / CANDIDATES_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(compared.as_json(), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return f"{compared.text()}\n{shown_path(path)}\n\n{compared.conclusion()}"


@dataclass(frozen=True)
class Candidates:
    """The candidates of a plan, each compared with the reference.

    Attributes:
        names: side -> what it changes, in the words a person copies.
        comparisons: side -> its comparison, or why there is none.
        rules: for each of them.
    """

    folder: Path
    names: Mapping[str, str]
    comparisons: Mapping[str, Comparison | str]
    rules: Rules

    @classmethod
    def read(cls, folder: Path, rules: Rules) -> Candidates:
        """Compare the launches of each candidate with those of the reference.

        Raises:
            InputError: the reference cannot be read.
        """
        from aorta.analysis.compare.launch_comparison import compare_launches
        from aorta.analysis.compare.launch_set import read_subjects

        asked = _asked(folder)
        found = [path.name for path in folder.iterdir() if path.name.startswith(f"{CANDIDATE}-")]
        names = sorted({*asked, *found} - {REFERENCE}, key=lambda name: (len(name), name))
        rules = replace(rules, primary=JOB_STEP, alpha=rules.alpha / len(names))
        reference = read_subjects({REFERENCE: folder / REFERENCE}, rules)[REFERENCE]
        comparisons: dict[str, Comparison | str] = {}
        for name in names:
            try:
                candidate = read_subjects({name: folder / name}, rules)[name]
                comparisons[name] = compare_launches(
                    (reference.dataset, candidate.dataset),
                    (reference.as_set(), candidate.as_set()),
                    ([], []),  # not shown
                    rules,
                )
            except InputError as error:
                comparisons[name] = str(error)
        return cls(folder, {name: _changes(asked, name) for name in (REFERENCE, *names)}, comparisons, rules)

    @property
    def judged(self) -> dict[str, Comparison]:
        """Side -> comparison, of those that could be compared."""
        return {name: found for name, found in self.comparisons.items() if isinstance(found, Comparison)}

    @property
    def best(self) -> str | None:
        """The improvement with the shortest step; None where nothing is an improvement."""
        better = {name: found for name, found in self.judged.items() if found.verdict == "improvement"}
        return min(better, key=lambda name: (better[name].metrics[JOB_STEP].candidate, len(name), name), default=None)

    def text(self) -> str:
        """Return the table, with what it needs to be understood."""
        judged = self.judged
        rows = [("", JOB_STEP, "delta, interval", "overlap", "verdict")]
        if judged:
            of_all = next(iter(judged.values()))  # every comparison has the same reference
            rows.append((REFERENCE, _cell(of_all, JOB_STEP, REFERENCE), "", _cell(of_all, OVERLAP, REFERENCE), ""))
        for name, found in judged.items():
            step, effect = _cell(found, JOB_STEP, CANDIDATE), format_effect(found.metrics[JOB_STEP].effect)
            rows.append((self.names[name], step, effect, _cell(found, OVERLAP, CANDIDATE), str(found.verdict)))
        count = len(self.comparisons)
        each = f"{self.rules.alpha:.2g}: {self.rules.alpha * count:.2g} shared among {count}"
        lines = [
            f"{REFERENCE}: {self.names[REFERENCE] or 'train.py as it is by default'}",
            *table(rows, indent="  "),
            f"values: medians of launches; verdicts on step time, each candidate at {each} (Bonferroni)",
        ]
        lines += [f"{self.names[name]}: {why}" for name, why in self.comparisons.items() if isinstance(why, str)]
        warnings = [warning for found in judged.values() for warning in found.warnings]
        lines += [f"note: {note}" for note in dict.fromkeys(warnings)]
        side = self.best or next(iter(self.comparisons))
        places = [str(shown_path(self.folder / name)) for name in (REFERENCE, side)]
        details = shlex.join(["aorta", "report", f"--{REFERENCE}", places[0], f"--{CANDIDATE}", places[1]])
        return f"{filled(lines)}\ndetails: {details}"

    def conclusion(self) -> str:
        """Return the recommendation, or that there is none."""
        best = self.best
        if best is None:
            return paragraph(f"no recommendation: none of the {len(self.comparisons)} was shown to be better")
        found = self.judged[best]
        others = sum(each.verdict == "improvement" for each in self.judged.values())
        more = f"; of {others} improvements it has the shortest step" if others > 1 else ""
        why = f"  step time {format_effect(found.metrics[JOB_STEP].effect)}; {found.verdict_reason}{more}"
        return f"recommendation: {self.names[best]}\n{paragraph(why)}"

    def as_json(self) -> dict[str, Any]:
        """Return the content of `candidates.json`."""
        from aorta.analysis.documents import as_json

        rows: list[dict[str, Any]] = []
        for name, found in self.comparisons.items():
            row = {"side": name, "changes": self.names[name]}
            if isinstance(found, str):
                rows.append({**row, "comparison": None, "reason": found})
                continue
            document = as_json(found)
            metrics = {metric: document["metrics"][metric] for metric in _METRICS if metric in document["metrics"]}
            kept = {key: document[key] for key in _KEPT if key in document}
            rows.append({**row, "comparison": kept | {"metrics": metrics}, "reason": None})
        return {
            "candidates_version": CANDIDATES_VERSION,
            "aorta_version": __version__,
            "folder": str(self.folder),
            "reference": self.names[REFERENCE],
            "alpha_each": self.rules.alpha,
            "margin": self.rules.margin,
            "candidates": rows,
            "recommendation": self.best,
        }


def format_effect(effect: Effect) -> str:
    """Format an effect with its interval in brackets; several times the reference as a factor."""

    def shown(value: float | None) -> str:
        if effect.kind == "quotient" and value is not None and value >= _MANY:
            return f"{1 + value:.2g}x"
        return TEXT.effect(value, effect.kind)

    if effect.low is None or effect.high is None:
        return shown(effect.value)
    return f"{shown(effect.value)} ({shown(effect.low)} to {shown(effect.high)})"


def _cell(comparison: Comparison, metric: str, side: Side) -> str:
    pair = comparison.metrics.get(metric)
    return _number(None if pair is None else pair.value(side), metric)


def _number(value: float | None, metric: str) -> str:
    return "-" if value is None else TEXT.number(value, metric_named(metric).unit)


def _asked(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what `plan.json` says of each side; nothing where it cannot be read: folders have names too."""
    try:
        plan = decode_json(read_small(folder / _PLAN_FILE), msgspec.json.Decoder(dict[str, Any]))
        shared = list(plan["asked"]["words"])
        sides = dict(plan["asked"]["sides"])
        own = {
            name: {"words": list(side["words"]), "environment": dict(side["environment"])}
            for name, side in sides.items()
        }
        own[REFERENCE]["words"] = [*shared, *own[REFERENCE]["words"]]
        return own
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _changes(asked: Mapping[str, dict[str, Any]], name: str) -> str:
    """Return the words of a side, those of the reference left out."""
    own, base = asked.get(name), asked.get(REFERENCE)
    if own is None or base is None:
        return name
    environment = own["environment"]
    if name != REFERENCE:
        environment = {key: value for key, value in environment.items() if base["environment"].get(key) != value}
    return " ".join([*shown_variables(environment), *own["words"]]) or ("" if name == REFERENCE else name)


def _sweep_text(folder: Path, primary: str) -> str:
    """Return a line for each job of a sweep, then what is missing and why.

    Raises:
        InputError: the journal cannot be read.
    """
    from aorta.analysis.aggregate import LabelledRun, step_entry
    from aorta.analysis.load.engines import Local
    from aorta.analysis.load.records import load_run

    path = folder / SWEEP_FILE
    try:
        found, missing = read_lines(path, SweptJob)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    # No path that leads elsewhere; and each job once, however often it is named.
    jobs = list({job.job: job for job in found if job.job.isascii() and job.job.isdigit()}.values())
    if not jobs:
        raise InputError(f"{path}: no job of a sweep in it; {missing[0] if missing else 'it is empty'}")
    keys = {job.job: dict(word.partition("=")[::2] for word in job.words) for job in jobs}
    names = dict.fromkeys(key for words in keys.values() for key in words)
    if len(names) > 100:
        raise InputError(f"{path}: its jobs set {len(names)} keys; 100 are possible")
    swept = [key for key in names if len({words.get(key) for words in keys.values()}) > 1]
    metrics = tuple(dict.fromkeys((primary, *_METRICS)))
    rows: list[Sequence[str]] = [("job", *swept, *metrics, "status")]
    emulated = False
    for job in jobs:
        values: dict[str, float | None] = {}
        status = "done" if job.reason is None else "failed"
        if job.reason is not None:
            missing.append(f"{job.job}: {job.reason}")
        else:
            try:
                dataset = LabelledRun(job.job, load_run(folder / job.job, Local(1)))
                emulated |= dataset.run.health.fabric is not None
                described = step_entry(dataset).described
                values = {name: entry.median for name, entry in described.items()}
                absent = [name for name in metrics if values.get(name) is None]
                missing += [f"{job.job} {name}: {_reason(described.get(name))}" for name in absent]
            except InputError as error:
                status = "unreadable"
                missing.append(f"{job.job}: {error}")
        numbers = (_number(values.get(name), name) for name in metrics)
        rows.append((job.job, *(keys[job.job].get(key, "-") for key in swept), *numbers, status))
    lines = [f"sweep {shown_path(folder)}: {len(jobs)} jobs"]
    if emulated:
        lines.append("EMULATED FABRIC: times are the emulation's, not a network's")
    lines += table(rows, right=range(1, len(rows[0]) - 1), indent="  ")
    lines.append("values: medians over the steps of each job, warm-up left out; one launch a job is no verdict")
    return filled([*lines, *missing])


def _reason(entry: Any) -> str:
    return "not in the record" if entry is None else str(entry.reason)
