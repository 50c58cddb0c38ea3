"""The report on a plan with several candidates (`aorta ab --candidate ... --candidate ...`, `--vary`), for `aorta
report FOLDER`: its table, `candidates.json`, and its page, which has the change of the step of each candidate with its
interval beside the reference, where the mean step of each goes, and what makes it longer or shorter.

With several candidates the chance that one of them looks better grows: each is judged at alpha / candidates
(Bonferroni, which holds however they depend on each other; here all share the reference's launches). Must not recommend
what the comparison did not call an improvement, or leave a candidate out.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from aorta.analysis.cautions import alerts
from aorta.analysis.compare.verdict import ALL, NOT_TESTED, WITHHELD, Rules
from aorta.analysis.headline import NOT_ALIKE, headline, numbers, verdict_label
from aorta.command_line import shown_path
from aorta.documents import as_json, known
from aorta.documents.comparison import SIDES, Comparison, Effect
from aorta.documents.dataset import DatasetEntry
from aorta.documents.formatting import PAGE, TEXT, first_upper
from aorta.documents.metrics import JOB_STEP
from aorta.documents.plans import Side
from aorta.errors import InputError
from aorta.read.locations import OUTPUTS, launch_folders
from aorta.records.files import NOT_UTF8, decode_json, json_text, read_small, write_whole
from aorta.report.page.elements import Row, scale_of, step_bars, waterfall
from aorta.report.page.page_content import PAGE_FILE, assemble
from aorta.report.run_tables import LOOKS
from aorta.report.tables import Column, Table, text_column, text_lines
from aorta.terminal_style import wrapped
from aorta.version import __version__

REFERENCE, CANDIDATE = SIDES
CANDIDATES_FILE: Final = "candidates.json"
CANDIDATES_VERSION: Final = 1


def plan_with(source: str, sides: Sequence[str]) -> Path | None:
    """Return the folder of a plan that has launches of these sides, given by path or by label; None where it is
    another.
    """
    folders = Path(source), Path(OUTPUTS, source)
    return next((folder for folder in folders if all(launch_folders(folder / side) for side in sides)), None)


@dataclass(frozen=True)
class Candidates:
    """The candidates of a plan, each compared with the reference by the same rules: side -> what it changes, in the
    words a person copies (`names`), and its comparison, or why there is none. `other_work`: of candidates that did
    other work than the reference, a comparison whose values count, but not its verdict. `entries`: side -> its mean
    step over all launches, and what is wrong with it.
    """

    folder: Path
    names: Mapping[str, str]
    comparisons: Mapping[str, Comparison | str]
    rules: Rules
    other_work: Mapping[str, Comparison] = field(default_factory=dict)
    entries: Mapping[str, DatasetEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, rules: Rules) -> Candidates:
        """Compare the launches of each candidate with those of the reference.

        Raises:
            InputError: the reference cannot be read.
        """
        from aorta.analysis.account import as_document
        from aorta.analysis.aggregate import aggregate
        from aorta.analysis.compare.launch_comparison import add_account, compare_launches
        from aorta.analysis.compare.launch_set import Subject, read_subjects

        def entry_of(subject: Subject) -> DatasetEntry:
            entry, launches = aggregate(subject.dataset), subject.as_set()
            entry.account, entry.launches = as_document(launches.accounts), len(launches.launches)
            entry.left_out = launches.left_out
            return entry

        changes = _changes(folder)
        folders = [path.name for path in folder.iterdir() if path.name.startswith(f"{CANDIDATE}-")]
        sides = sorted({*changes, *folders} - {REFERENCE}, key=lambda name: (len(name), name))
        rules = replace(rules, primary=JOB_STEP, alpha=rules.alpha / len(sides))
        reference = read_subjects({REFERENCE: folder / REFERENCE}, rules)[REFERENCE]
        entries: dict[str, DatasetEntry] = {REFERENCE: entry_of(reference)}
        comparisons: dict[str, Comparison | str] = {}
        other_work: dict[str, Comparison] = {}
        for name in sides:
            try:
                candidate = read_subjects({name: folder / name}, rules)[name]
                entries[name] = entry_of(candidate)
                runs, sets = (reference.dataset, candidate.dataset), (reference.as_set(), candidate.as_set())
                compare = partial(compare_launches, runs, sets, ([], []))  # their collectives are not shown
                try:
                    comparison = comparisons[name] = compare(rules)
                    add_account(comparison, (reference, candidate), rules)
                    comparison.headline, comparison.numbers = headline(comparison), numbers(comparison)
                except InputError as error:
                    comparisons[name] = str(error)
                    other_work[name] = compare(replace(rules, allow_unlike=(ALL,)))
            except InputError as error:
                comparisons.setdefault(name, str(error))
        names = {REFERENCE: changes.get(REFERENCE, REFERENCE)} | {name: changes.get(name) or name for name in sides}
        return cls(folder, names, comparisons, rules, other_work, entries)

    @property
    def judged(self) -> dict[str, Comparison]:
        """Side -> comparison, of those that could be compared."""
        return {name: comparison for name, comparison in self.comparisons.items() if isinstance(comparison, Comparison)}

    @property
    def shown(self) -> dict[str, Comparison]:
        """Side -> comparison whose values count, those of other work last."""
        return {**self.judged, **self.other_work}

    @property
    def named_entries(self) -> dict[str, DatasetEntry]:
        """The entries by what each side is called in the table and on the page."""
        return {side if side == REFERENCE else self.names[side]: entry for side, entry in self.entries.items()}

    @property
    def best(self) -> str | None:
        """The improvement with the shortest step; None where nothing is an improvement."""
        better = {name: comparison for name, comparison in self.judged.items() if comparison.verdict == "improvement"}
        return min(
            better, key=lambda name: (better[name].metrics[JOB_STEP].candidate.value, len(name), name), default=None
        )

    def verdict(self, side: str) -> str:
        """Return the verdict on a candidate that could be compared; with the launches that it takes, where these are
        too few for one.
        """
        comparison, step = self.judged[side], self.judged[side].metrics[JOB_STEP]
        return verdict_label(step) if step.verdict == NOT_TESTED else comparison.verdict

    def table(self) -> Table:
        """Return a row for the reference and each candidate."""
        rows: list[dict[str, Any]] = []

        def add(name: str, side: Literal["reference", "candidate"], comparison: Comparison, **judged: Any) -> None:
            pairs = {metric: comparison.metrics.get(metric) for metric in (JOB_STEP, "overlap_ratio")}
            values = {metric: pair.side(side).value for metric, pair in pairs.items() if pair is not None}
            rows.append({"name": name} | values | judged)

        for comparison in [*self.shown.values()][:1]:  # all have the same reference
            add(REFERENCE, "reference", comparison)
        for side in self.comparisons:
            if side in self.other_work:
                add(self.names[side], "candidate", self.other_work[side], verdict=NOT_ALIKE)
            elif side in self.judged:
                effect = self.judged[side].metrics[JOB_STEP].test.effect
                judged = {"change": effect, "interval": effect.bounded, "verdict": self.verdict(side)}
                add(self.names[side], "candidate", self.judged[side], **judged)
        columns = [
            text_column("name", "side"),
            Column(JOB_STEP),
            Column("change", unit="effect"),
            Column("interval", unit="interval"),
            Column("overlap_ratio", unit="ratio"),
            text_column("verdict"),
        ]
        return Table("candidates", "The reference and the candidates", columns, rows, first_upper(f"{self.basis}."))

    @property
    def basis(self) -> str:
        """What the table needs to be understood."""
        count = len(self.comparisons)
        level = f"{self.rules.alpha:.2g}: {self.rules.alpha * count:.2g} shared among {count}"
        return f"values: medians of launches; verdicts on step time, each candidate at {level} (Bonferroni)"

    @property
    def alerts(self) -> list[str]:
        """What is wrong with the launches, the most serious first."""
        warnings = [warning for comparison in self.judged.values() for warning in comparison.warnings]
        return [*dict.fromkeys([*alerts(self.named_entries), *warnings])]

    def text(self) -> str:
        """Return the table, with what it needs to be understood."""
        side = self.best or next(iter(self.comparisons))
        folders = [str(shown_path(self.folder / name)) for name in (REFERENCE, side)]
        details = shlex.join(["aorta", "report", f"--{REFERENCE}", folders[0], f"--{CANDIDATE}", folders[1]])
        head = f"{REFERENCE}: {self.names[REFERENCE] or 'train.py as it is by default'}"
        lines = text_lines(self.table(), titled=False)
        wrong = [f"warning: {alert}" for alert in self.alerts]
        notes = [f"{self.names[name]}: {why}" for name, why in self.comparisons.items() if isinstance(why, str)]
        return "\n".join([wrapped([head]), *wrong, *lines, wrapped([self.basis, *notes]), f"details: {details}"])

    def conclusion(self) -> str:
        """Return which side to take."""
        best = self.best
        if best is None:
            judged = [comparison for comparison in self.judged.values() if comparison.verdict not in WITHHELD]
            count, compared = len(self.comparisons), len(judged)
            if not compared:
                return "no recommendation: no candidate could be compared with the reference"
            steps = [comparison.metrics.get(JOB_STEP) for comparison in judged]
            tests = [step.test for step in steps if step is not None and step.verdict == NOT_TESTED]
            needed = [test.least_launches for test in tests if test.least_launches is not None]  # null: equal values
            if len(needed) == compared:
                return f"no recommendation: a verdict takes {max(needed)} launches per side"
            if all(comparison.verdict == "regression" for comparison in judged) and compared == count:
                return f"keep the reference: {'both' if count == 2 else f'all {count}'} candidates are slower"
            of = f"{count} candidates" if compared == count else f"{compared} of {count} candidates that were compared"
            return f"keep the reference: none of the {of} is significantly faster"
        winner = self.judged[best]
        others = sum(comparison.verdict == "improvement" for comparison in self.judged.values())
        more = f"; of {others} improvements it has the shortest step" if others > 1 else ""
        test = winner.metrics[JOB_STEP].test
        why = f"  step time {format_effect(test.effect)}; {test.verdict_reason}{more}"
        return f"recommendation: {self.names[best]}\n{wrapped([why])}"

    def as_json(self) -> dict[str, Any]:
        """Return the content of `candidates.json`."""
        rows = []
        for name, comparison in self.comparisons.items():
            known, reason = (None, comparison) if isinstance(comparison, str) else (as_json(comparison), None)
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


class _Asked(msgspec.Struct):
    sides: dict[str, Side]
    words: tuple[str, ...] = ()


class _PlanFile(msgspec.Struct):
    asked: _Asked


def _changes(folder: Path) -> dict[str, str]:
    """Return what each side changes by `plan.json`, of candidates against the reference; nothing where it cannot be
    read: folders have names too.
    """
    try:
        asked = decode_json(read_small(folder / "plan.json"), msgspec.json.Decoder(_PlanFile)).asked
        reference = asked.sides[REFERENCE]
        whole = msgspec.structs.replace(reference, words=(*asked.words, *reference.words))
        changes = {name: side.settings(reference) for name, side in asked.sides.items()}
        return {**changes, REFERENCE: whole.settings(Side())}
    except (OSError, ValueError, KeyError):
        return {}


def report_many(folder: Path, options: argparse.Namespace, rules: Rules) -> str:
    """Return the table of a plan, and write `candidates.json` and the page.

    Raises:
        InputError: an option that is about two sides, a folder that cannot be read, or an output that cannot be
            written.
    """
    for name in ("fail_on", "log", "append"):
        if getattr(options, name):
            raise InputError(
                f"--{name.replace('_', '-')}: is about one side or two, and {folder} holds many; name them, as in "
                f"aorta report --{REFERENCE} {folder / REFERENCE} --{CANDIDATE} {folder / f'{CANDIDATE}-1'}"
            )
    compared = Candidates.read(folder, rules)
    output = Path(options.output or Path("reports", folder.resolve().name))
    path = output / CANDIDATES_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(path, json_text(compared.as_json()).encode())
        if options.html:
            path = output / PAGE_FILE
            write_candidates(compared, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return f"{compared.text()}\n{shown_path(path)}\n\n{compared.conclusion()}"


def write_candidates(compared: Candidates, path: Path) -> None:
    """Write the page of a plan to `path`, replacing what is there.

    Raises:
        OSError: `path` cannot be written.
    """
    rows, band = _effect_rows(compared)
    accounts = []
    for side, pair in compared.comparisons.items():  # why it was not compared, or from the reference's step to its own
        sentence, parts = pair, list[Row]()
        if isinstance(pair, Comparison):
            account = known(pair.account)
            why = f"{pair.verdict}: {pair.verdict_reason}." if pair.verdict in WITHHELD else account and account.reason
            sentence = pair.sentence or why or "no part of the step is certain to have changed."
            sentence, parts = sentence.replace("->", "\u2192"), waterfall(account)
        accounts.append((compared.names[side], sentence, parts))
    heading, _, why = compared.conclusion().partition("\n")
    context = {
        "numbers_in": CANDIDATES_FILE,
        "heading": first_upper(heading),
        "title": str(compared.folder),
        "sentence": first_upper(" ".join(why.split())),
        "tone": "good" if compared.best else "open",
        "symbol": "\u2713" if compared.best else "",
        "alerts": compared.alerts,
        "rows": rows,
        "band": band,
        "bars": step_bars(compared.named_entries),
        "accounts": accounts,
        "table": compared.table(),
    }
    write_whole(path, assemble("candidates.html.jinja", context).encode("utf-8", errors=NOT_UTF8))


def _effect_rows(compared: Candidates) -> tuple[list[Row], tuple[float, float]]:
    """Return the reference at 0 and a dot with its interval for the change of each candidate; and the band of changes
    up to the margin: where it begins, and how wide it is.
    """
    margin, steps = compared.rules.margin, {side: pair.metrics[JOB_STEP] for side, pair in compared.judged.items()}
    effects = [step.test.effect for step in steps.values()]
    ends = [end for effect in effects for end in (effect.value, effect.low, effect.high) if end is not None]
    scale = scale_of([-margin, margin, *ends])
    reference = next((pair.metrics[JOB_STEP].reference.value for pair in compared.shown.values()), None)
    rows = [Row(REFERENCE, "reference", scale(0.0), 0.0, None, PAGE.quantity(reference, "ms"), "", "")]
    for side in compared.comparisons:
        name, step = compared.names[side], steps.get(side)
        if step is None:
            rows.append(Row(name, "", 0.0, 0.0, None, "", "", "not comparable", "open"))
            continue
        effect, interval = step.test.effect, None
        values, tone = PAGE.quantity(step.candidate.value, "ms"), LOOKS[compared.judged[side].verdict][0]
        note = "recommended" if side == compared.best else compared.verdict(side)
        if effect.value is None:
            rows.append(Row(name, "", 0.0, 0.0, None, values, "", note, tone))
            continue
        change = PAGE.effect(effect.value, effect.kind)
        if effect.low is not None and effect.high is not None:
            interval, change = (scale(effect.low), scale(effect.high)), f"{change} ({PAGE.interval(effect)})"
        rows.append(Row(name, "candidate", scale(effect.value), 0.0, interval, values, change, note, tone))
    return rows, (scale(-margin), scale(margin) - scale(-margin))
