"""One table over many launches, for `aorta report FOLDER`: of a plan with several candidates (`aorta ab --candidate ...
--candidate ...`, `--vary`), or of a sweep (`aorta train -m`).

With several candidates the chance that one of them looks better grows: each is judged at alpha / candidates
(Bonferroni, which holds however they depend on each other; here all share the reference's launches). The jobs of a
sweep are one launch each: values, no verdict. Must not recommend what the comparison did not call an improvement, or
leave a candidate or a job out.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.analysis.compare.verdict import Rules
from aorta.command_line import shown_path
from aorta.documents import as_json
from aorta.documents.comparison import SIDES, Comparison, Effect
from aorta.documents.formatting import TEXT
from aorta.documents.metrics import JOB_STEP, metric_named
from aorta.errors import InputError
from aorta.read.locate import OUTPUTS
from aorta.read.locations import launch_folders
from aorta.records.files import decode_json, json_text, read_lines, read_small, write_whole
from aorta.redaction import shown_variables
from aorta.report.tables import Column, Table, text_column, text_lines
from aorta.terminal_style import wrapped
from aorta.version import __version__

REFERENCE, CANDIDATE = SIDES
SWEEP_FILE: Final = "sweep.jsonl"
CANDIDATES_FILE: Final = "candidates.json"
CANDIDATES_VERSION: Final = 1
_METRICS: Final = (JOB_STEP, "overlap_ratio")
_MOST_KEYS: Final = 100


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
        write_whole(path, json_text(compared.as_json()).encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return f"{compared.text()}\n{shown_path(path)}\n\n{compared.conclusion()}"


@dataclass(frozen=True)
class Candidates:
    """The candidates of a plan, each compared with the reference by the same rules: side -> what it changes, in the
    words a person copies (`names`), and its comparison, or why there is none.
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

        changes = _changes(folder)
        found = [path.name for path in folder.iterdir() if path.name.startswith(f"{CANDIDATE}-")]
        sides = sorted({*changes, *found} - {REFERENCE}, key=lambda name: (len(name), name))
        rules = replace(rules, primary=JOB_STEP, alpha=rules.alpha / len(sides))
        reference = read_subjects({REFERENCE: folder / REFERENCE}, rules)[REFERENCE]
        comparisons: dict[str, Comparison | str] = {}
        for name in sides:
            try:
                candidate = read_subjects({name: folder / name}, rules)[name]
                runs, sets = (reference.dataset, candidate.dataset), (reference.as_set(), candidate.as_set())
                comparisons[name] = compare_launches(runs, sets, ([], []), rules)  # their collectives are not shown
            except InputError as error:
                comparisons[name] = str(error)
        names = {REFERENCE: changes.get(REFERENCE, REFERENCE)} | {name: changes.get(name) or name for name in sides}
        return cls(folder, names, comparisons, rules)

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
        # Every comparison has the same reference, whose row has no effect and no verdict.
        rows: list[dict[str, Any]] = [{"side": REFERENCE, "found": each} for each in [*judged.values()][:1]]
        rows += [{"side": CANDIDATE, "name": self.names[name], "found": each} for name, each in judged.items()]

        def measured(metric: str) -> Column:
            def value(row: dict[str, Any]) -> float | None:
                pair = row["found"].metrics.get(metric)
                return None if pair is None else pair.value(row["side"])

            return Column(metric, unit=metric_named(metric).unit, of=value)

        def effect(row: dict[str, Any]) -> str | None:
            return None if row["side"] == REFERENCE else format_effect(row["found"].metrics[JOB_STEP].effect)

        columns = [
            text_column("name", "side", of=lambda row: row.get("name", REFERENCE)),
            measured(JOB_STEP),
            text_column("effect", "change, interval", of=effect),
            measured("overlap_ratio"),
            text_column("verdict", of=lambda row: None if row["side"] == REFERENCE else row["found"].verdict),
        ]
        count = len(self.comparisons)
        level = f"{self.rules.alpha:.2g}: {self.rules.alpha * count:.2g} shared among {count}"
        notes = [f"values: medians of launches; verdicts on step time, each candidate at {level} (Bonferroni)"]
        notes += [f"{self.names[name]}: {why}" for name, why in self.comparisons.items() if isinstance(why, str)]
        notes += dict.fromkeys(f"note: {warning}" for each in judged.values() for warning in each.warnings)
        side = self.best or next(iter(self.comparisons))
        places = [str(shown_path(self.folder / name)) for name in (REFERENCE, side)]
        details = shlex.join(["aorta", "report", f"--{REFERENCE}", places[0], f"--{CANDIDATE}", places[1]])
        head = f"{REFERENCE}: {self.names[REFERENCE] or 'train.py as it is by default'}"
        lines = text_lines(Table("candidates", "", columns, rows), titled=False)
        return "\n".join([wrapped([head]), *lines, wrapped(notes), f"details: {details}"])

    def conclusion(self) -> str:
        """Return the recommendation, or that there is none."""
        best = self.best
        if best is None:
            return f"no recommendation: none of the {len(self.comparisons)} was shown to be better"
        found = self.judged[best]
        others = sum(each.verdict == "improvement" for each in self.judged.values())
        more = f"; of {others} improvements it has the shortest step" if others > 1 else ""
        why = f"  step time {format_effect(found.metrics[JOB_STEP].effect)}; {found.verdict_reason}{more}"
        return f"recommendation: {self.names[best]}\n{wrapped([why])}"

    def as_json(self) -> dict[str, Any]:
        """Return the content of `candidates.json`."""
        rows = []
        for name, found in self.comparisons.items():
            known, reason = (None, found) if isinstance(found, str) else (as_json(found), None)
            rows.append({"side": name, "changes": self.names[name], "comparison": known, "reason": reason})
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
    """Format an effect with its interval in brackets."""
    interval = "" if effect.low is None or effect.high is None else f" ({TEXT.interval(effect)})"
    return f"{TEXT.effect(effect.value, effect.kind)}{interval}"


def _changes(folder: Path) -> dict[str, str]:
    """Return what each side changes by `plan.json`, of candidates against the reference; nothing where it cannot be
    read: folders have names too.
    """
    try:
        asked = decode_json(read_small(folder / "plan.json"), msgspec.json.Decoder(dict[str, Any]))["asked"]
        sides, shared = dict(asked["sides"]), dict(asked["sides"][REFERENCE]["environment"])
        changes = {}
        for name, side in sides.items():
            own = dict(side["environment"])
            if name != REFERENCE:
                own = {key: value for key, value in own.items() if shared.get(key) != value}
            words = [*(asked["words"] if name == REFERENCE else ()), *side["words"]]
            changes[name] = " ".join([*shown_variables(own), *words])
        return changes
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _sweep_text(folder: Path, primary: str) -> str:
    """Return a line for each job of a sweep, then what is missing and why.

    Raises:
        InputError: the journal cannot be read.
    """
    from aorta.analysis.aggregate import LabelledRun, step_entry
    from aorta.read.engines import Local
    from aorta.read.record import load_run

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
    if len(names) > _MOST_KEYS:
        raise InputError(f"{path}: its jobs set {len(names)} keys; {_MOST_KEYS} are possible")
    swept = [key for key in names if len({words.get(key) for words in keys.values()}) > 1]
    metrics = tuple(dict.fromkeys((primary, *_METRICS)))
    rows: list[dict[str, Any]] = []
    emulated = False
    for job in jobs:
        row: dict[str, Any] = {"job": job.job, "status": "done" if job.reason is None else "failed"}
        row |= {f"set {key}": keys[job.job].get(key) for key in swept} | dict.fromkeys(metrics)
        rows.append(row)
        if job.reason is not None:
            missing.append(f"{job.job}: {job.reason}")
            continue
        try:
            dataset = LabelledRun(job.job, load_run(folder / job.job, Local(1)))
            emulated |= dataset.run.health.fabric is not None
            described = step_entry(dataset).described
        except InputError as error:
            row["status"] = "unreadable"
            missing.append(f"{job.job}: {error}")
            continue
        for name in metrics:
            entry = described.get(name)
            row[name] = None if entry is None else entry.median
            if row[name] is None:
                missing.append(f"{job.job} {name}: {'not in the record' if entry is None else entry.reason}")
    columns = [
        text_column("job"),
        *(text_column(f"set {key}", key) for key in swept),
        *(Column(name, unit=metric_named(name).unit) for name in metrics),
        text_column("status"),
    ]
    fabric = ["EMULATED FABRIC: times are the emulation's, not a network's"] if emulated else []
    lines = text_lines(Table("sweep", "", columns, rows), titled=False)
    values = "values: medians over the steps of each job, warm-up left out; one launch a job is no verdict"
    head = wrapped([f"sweep {shown_path(folder)}: {len(jobs)} jobs", *fabric])
    return "\n".join([head, *lines, wrapped([values, *missing])])
