"""The command `aorta report`: arguments become labelled sources, rules and a gate; loggers get the numbers.

Must not import pandas or matplotlib before the arguments are known to be good, or give a logger a value that
`summary.json` does not have.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from aorta.analysis.compare.rank_tests import least_launches
from aorta.analysis.compare.verdict import NOT_TESTED, Rules, is_comparable
from aorta.analysis.gate import add_gate_arguments, gate_text, judge
from aorta.analysis.headline import leading, title
from aorta.command_line import command, to_stderr, to_stdout
from aorta.documents import known
from aorta.documents.comparison import SIDES, Summary
from aorta.documents.formatting import TEXT
from aorta.documents.metrics import metric_named
from aorta.errors import EXIT_OK, InputError, meant
from aorta.installation import checkout
from aorta.loggers import NAMES, LoggedRun, missing_client, open_logger
from aorta.read.engines import Dask, Engine, Local
from aorta.read.locations import Location, check_label, is_location, label_of, labels_of, locate
from aorta.read.traces.interval_table import add_comm_pattern
from aorta.read.traces.reader import headers_in
from aorta.records.run_files import REPORT_EVENTS
from aorta.redaction import redact
from aorta.report.candidates import CANDIDATE, plan_with, report_many
from aorta.report.history import append_rows, check_history, rows_of
from aorta.report.text import append_markdown
from aorta.terminal_style import style_of

_LOGGED_FACTS: Final = ("run_id", "path", "platform", "backend", "parallel", "instrument_mode", "manifest_hash")


@command()
def overlap_report(arguments: Sequence[str]) -> int:
    """Run `aorta report`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_intermixed_args(arguments)
    rules = Rules(
        primary=options.primary,
        alpha=options.alpha,
        margin=options.margin,
        allow_unlike=tuple(options.allow_unlike),
        judge_milliseconds=options.judge_milliseconds,
        assume_no_drift=options.assume_no_drift,
    )
    many = plan_with(options.sources[0], [f"{CANDIDATE}-1"]) if len(options.sources) == 1 else None
    if many is not None:
        to_stdout(report_many(many, options, rules))
        return EXIT_OK
    sources = _sources(options, checkout() or Path.cwd())
    if options.fail_on and (options.reference is None or options.candidate is None):
        raise InputError(
            "--fail-on judges a difference, so give two runs: aorta report REFERENCE CANDIDATE --fail-on ..."
        )
    if options.log and (problem := missing_client(options.log)) is not None:
        raise InputError(f"--log {','.join(options.log)}: {problem}")
    output = Path(options.output) if options.output else _default_output(options, sources)
    from aorta.report.summary import write_report

    if options.append is not None:
        check_history(options.append)
    style = style_of(sys.stdout)
    report = write_report(
        sources,
        output,
        options.reference,
        options.candidate,
        engine=_engine(options),
        comm_patterns=options.comm_pattern,
        rules=rules,
        finish=partial(judge, options),
        html=options.html,
        brief=not options.all,
        style=style,
    )
    result = known(report.content.gate)
    decided, appended = "" if result is None else gate_text(result, style), ""
    if options.markdown is not None:
        append_markdown(Path(options.markdown), report.content)
        appended = f"Markdown: summary appended to {options.markdown}"
    same = shlex.join(["aorta", "report", *(word for word in arguments if word != "--all")])  # to be copied, added to
    more = "" if options.all else f"More: {same} --all"
    following = "" if options.fail_on else _next(same, report.content, rules)
    blocks = [report.text, decided, appended, more, following]
    to_stdout(("\n\n" if options.all else "\n").join(filter(None, blocks)))
    if options.append is not None:
        added = append_rows(options.append, rows_of(report.subjects))
        to_stdout(
            f"{options.append}: {TEXT.count(len(added), 'row')} appended" + ("" if added else ": it has them all")
        )
    code = EXIT_OK if result is None else result.exit_code
    try:
        _log_summary(report.content, options.log, output)
    except InputError as error:
        if not code:
            raise
        to_stderr(f"{style_of(sys.stderr).error('error:')} {error}")  # the gate's answer stays the exit code
    return code


def _next(command: str, summary: Summary, rules: Rules) -> str:
    """Return what to do after a report: hold the metric that decided in continuous integration, which fails on a change
    for the worse that is larger than the margin; or launch so often that a verdict can come; empty for one source.
    """
    comparison = known(summary.comparison)
    if comparison is None or not is_comparable(comparison):
        return ""
    if title(comparison) == NOT_TESTED:
        least = least_launches(rules.alpha)
        return f"For a verdict, {least} launches a side: aorta ab --launches {least} (aorta ab --help)"
    name = leading(comparison)
    entry = comparison.metrics.get(name)
    if entry is None or entry.verdict is None:
        return ""  # a gate could not decide either
    test = entry.test
    chance = test.p is not None and test.p > rules.alpha and test.effect.value is not None
    if entry.verdict == "inconclusive" and chance:
        if test.power.launches is None:
            return ""  # nor would a gate decide
        wanted = TEXT.effect(max(abs(test.effect.value or 0.0), test.margin), test.effect.kind).lstrip("+")
        count, power = max(test.power.launches, max(entry.counts) + 1), TEXT.percent(test.power.probability, 0)
        return (
            f"Next: {count} new launches a side find a change of {name} by {wanted} with {power} probability: "
            f"aorta ab --launches {count}"
        )
    metric = metric_named(name)
    size = f"{rules.margin:g}" if metric.unit == "ratio" else f"{100 * rules.margin:g}%"
    limit = f"{name}{'<-' if metric.better == 'higher' else '>'}{size}"
    return f"Next: as a gate in CI: {command} {shlex.join(['--fail-on', limit])}"


def parser() -> argparse.ArgumentParser:
    """Return the arguments that the command takes."""
    parser = argparse.ArgumentParser(
        description="How well communication hid behind computation: numbers, pictures, and one run against another.",
        epilog="Without --log-dir a label L is looked up in the current directory, then in the checkout: artifacts_L/, "
        "artifacts_L/L/, artifacts/L/, then artifacts/ if its records are labelled L or were made on platform L; then "
        "L is a path. Wherever a run is named, traces of other tools may be: a file, folder, glob or URL of Kineto "
        "traces (.json, .json.gz, .tar.gz), rocprofv3 output (JSON, CSV, rocpd) or an nsys SQLite export, recognised "
        "by their content. A folder of several run folders is a launch set: each is one launch, and two sets get a "
        "verdict from four launches per side; single runs get numbers only. Files of an earlier report in the output "
        "folder are replaced. Exit codes: 0 done, 2 bad input, 3 gate failed, 4 the data cannot decide, 127 a package "
        "is missing.",
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="LABEL|PATH",
        help="one: a report of it, or a comparison of the two sides of an A/B's folder; two: the reference, and the "
        "candidate that is compared with it. Folders that hold ranks of one run, as nodes without a shared disk leave "
        "them, are one",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="print everything: all metrics, collectives, notes, files; otherwise the answer in at most 22 lines",
    )
    parser.add_argument(
        "--log-dir", action="append", default=[], metavar="PATH", help="run folder or traces; repeatable"
    )
    parser.add_argument("--label", action="append", default=[], metavar="NAME", help="its name; one per --log-dir")
    parser.add_argument("--reference", metavar="LABEL|PATH", help="what to compare with (CUDA, say)")
    parser.add_argument("--candidate", metavar="LABEL|PATH", help="what is judged (ROCm, say)")
    add_comm_pattern(parser)
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="default: reports/LABEL/ or reports/CANDIDATE-vs-REFERENCE/ where you are, of an A/B reports/PLAN/",
    )
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="of a Dask cluster whose workers read the files: tcp://HOST:8786, say"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes that read the files here (default: one a core)"
    )
    parser.add_argument(
        "--html",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write report.html, one page that works offline",
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        choices=NAMES,
        metavar="TOOL",
        help=f"give medians and verdicts to {', '.join(NAMES)}; repeatable; each is an extra (docs/loggers.md)",
    )
    parser.add_argument(
        "--append",
        type=Path,
        metavar="FILE",
        help="add a row for each launch set to a CSV file: time, commit, label, medians, environment (docs/history.md)",
    )
    rules = Rules()
    group = parser.add_argument_group("launch sets")
    group.add_argument(
        "--primary", default=rules.primary, metavar="METRIC", help="carries the verdict (default: %(default)s)"
    )
    group.add_argument(
        "--alpha", type=float, default=rules.alpha, metavar="P", help="highest p of a finding (default: %(default)s)"
    )
    group.add_argument(
        "--margin",
        type=float,
        default=rules.margin,
        metavar="SIZE",
        help="differences of a ratio, and shares of milliseconds, up to this count as none (default: %(default)s)",
    )
    group.add_argument(
        "--allow-unlike",
        action="append",
        default=[],
        metavar="KEY",
        help="a key in which launches or runs may differ though it changes the work (workload.model_dim, say), or all; "
        "repeatable",
    )
    group.add_argument(
        "--judge-milliseconds", action="store_true", help="judge them across platforms too, not ratios alone"
    )
    group.add_argument(
        "--assume-no-drift",
        action="store_true",
        help="judge launches that did not take turns too, as if the machine were the same throughout "
        "(docs/compare.md); otherwise there is no verdict",
    )
    add_gate_arguments(parser)
    return parser


def _engine(options: argparse.Namespace) -> Engine:
    """Return what reads the files.

    Raises:
        InputError: words that do not go together.
    """
    if options.jobs is not None and (options.jobs < 1 or options.scheduler is not None):
        raise InputError(f"--jobs {options.jobs}: at least 1, and not with --scheduler, whose workers read")
    return Local(options.jobs) if options.scheduler is None else Dask(options.scheduler)


def _sources(options: argparse.Namespace, root: Path) -> dict[str, Location]:
    """Map labels to folders, files, globs or URLs, as given, and let `reference` and `candidate` of the options be
    labels among them. Two sources are reference and candidate, one is the reference, the folder of an A/B is both.

    Raises:
        InputError: nothing is named, more than two sources, sources beside options that name some, or labels that are
            unequal in number to the folders, doubled, unknown or not file names.
    """
    nodes: dict[str, Location] = {}
    if options.sources:
        if options.reference or options.candidate or options.log_dir or options.label:
            raise InputError(
                f"{' '.join(options.sources)}: sources are named by themselves (aorta report A B) or by options "
                "(--reference, --candidate, --log-dir with --label), not both"
            )
        if len({Path(word).absolute() for word in options.sources}) < len(options.sources):
            raise InputError(
                f"{' '.join(options.sources)}: the same source twice; give it once, or with another to compare with"
            )
        runs: dict[object, list[str]] = {}
        for word in options.sources:  # folders that hold ranks of the same attempt of one run are one source
            header = next(iter(headers_in([Path(word)])), None)
            runs.setdefault(word if header is None else (header.run_id, header.attempt), []).append(word)
        if len(runs) > 2:
            raise InputError(
                f"{len(runs)} sources: aorta report takes one, or a reference and a candidate. Launches of one "
                "side belong into one folder; more datasets are named with --log-dir DIR --label NAME"
            )
        nodes = {words[0]: tuple(map(Path, words)) for words in runs.values() if len(words) > 1}
        names = [words[0] for words in runs.values()]
        if len(options.sources) == 1 and (plan := plan_with(names[0], SIDES)) is not None:
            names = [str(plan / side) for side in SIDES]
        options.reference, options.candidate = (*names, None)[:2]
    words = {side: word for side in SIDES if (word := getattr(options, side)) is not None}
    if options.log_dir or options.label:
        if len(options.log_dir) != len(options.label):
            raise InputError(
                f"--log-dir and --label counts must match: {len(options.log_dir)} --log-dir, {len(options.label)} "
                "--label"
            )
        labels = _distinct([check_label(label) for label in options.label])
        for label in words.values():
            if label not in labels:
                hint = meant(label, labels, after=" ")
                raise InputError(f"{label!r} is not among the labels; {hint}known labels: {', '.join(labels)}")
        _distinct([*words.values()])
        return dict(zip(labels, options.log_dir, strict=True))
    if not words:
        raise InputError(
            "nothing to report on: name a run or traces (a label, folder or file), or two to compare; "
            "see aorta report --help"
        )
    here = Path.cwd()
    paths = {side: word for side, word in words.items() if is_location(word, here, root)}
    if not paths:
        _distinct([*words.values()])
    named = {side: label_of(word) if side in paths else word for side, word in words.items()}
    if len(paths) == len(SIDES):
        named = dict(zip(SIDES, labels_of(*(paths[side] for side in SIDES)), strict=True))
    if len(set(named.values())) < len(named):
        named = {side: f"{label}-{side}" if side in paths else label for side, label in named.items()}
    for side, label in named.items():
        setattr(options, side, check_label(label))
    located = locate([label for side, label in named.items() if side not in paths], here, root)
    return {
        label: nodes.get(paths[side], paths[side]) if side in paths else located[label] for side, label in named.items()
    }


def _distinct(labels: list[str]) -> list[str]:
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"label {label!r} is given twice; every dataset needs a label of its own")
    return labels


def _default_output(options: argparse.Namespace, sources: Mapping[str, Location]) -> Path:
    """Return a folder named after the plan of which these are the sides, else after the labels."""
    paths = [Path(path) for path in sources.values() if isinstance(path, str | Path)]
    if tuple(path.name for path in paths) == SIDES and paths[0].parent == paths[1].parent != Path():
        return Path("reports", label_of(str(paths[0].parent)))
    if options.reference is not None and options.candidate is not None:
        return Path("reports", f"{options.candidate}-vs-{options.reference}")
    return Path("reports", "-and-".join(sources))


def _log_summary(summary: Summary, names: Sequence[str], output: Path) -> None:
    """Open each logger for the report, give it `<metric>_median` of each dataset, and of the comparison `verdict`, and
    per metric `<metric>_difference`, `<metric>_p` (the p that was judged) and `<metric>_verdict`; close it. What is
    null is left out.

    Args:
        names: of `aorta.loggers`.
        output: folder of the report; loggers that write files write them there.

    Raises:
        InputError: a logger failed; the others have got everything.
    """
    title, compared = "-and-".join(summary.datasets), known(summary.comparison)
    logged: dict[str, dict[str, Any]] = {
        label: {"rank_steps": entry.count}
        | {f"{name}_median": statistics.median for name, statistics in entry.described.items()}
        for label, entry in summary.datasets.items()
    }
    if compared is not None:
        title = f"{compared.candidate}-vs-{compared.reference}"
        values = logged[title] = {"verdict": compared.verdict, "verdict_reason": compared.verdict_reason}
        for name, pair in compared.metrics.items():
            values[f"{name}_difference"] = pair.difference
            if (test := known(pair.test)) is not None:
                values[f"{name}_p"] = test.p if test.p_corrected is None else test.p_corrected
                values[f"{name}_verdict"] = test.verdict
    facts = {
        f"{label}.{name}": _clean(value)
        for label, entry in summary.datasets.items()
        for name in _LOGGED_FACTS
        if (value := getattr(entry.source, name)) is not None
    }
    failed = []
    for name in dict.fromkeys(names):
        try:
            with closing(open_logger(name, LoggedRun(output, title, facts, event_suffix=REPORT_EVENTS))) as logger:
                for label, values in logged.items():
                    logger.log_summary(
                        label, {key: _clean(value) for key, value in values.items() if value is not None}
                    )
        except Exception as error:  # noqa: BLE001  a client may raise anything; it is raised below, by name
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise InputError(f"the report is written to {output}, but not every logger took it: {'; '.join(failed)}")


def _clean(value: Any) -> Any:
    return redact(value) if isinstance(value, str) else value
