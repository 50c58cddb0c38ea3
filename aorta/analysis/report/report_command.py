"""The command `aorta report`: arguments become labelled sources, rules and a gate; loggers get the numbers.

Must not import pandas or matplotlib before the arguments are known to be good, or give a logger a value that
`summary.json` does not have.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from aorta.analysis.compare.headline import is_comparable
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import SIDES, Comparison, Summary
from aorta.analysis.gate import add_gate_arguments, judge, run_gate
from aorta.analysis.load.engines import Dask, Engine, Local
from aorta.analysis.load.interval_table import add_comm_pattern
from aorta.analysis.load.locations import Location, launch_folders
from aorta.analysis.load.trace_source import headers_in
from aorta.analysis.locate import OUTPUTS, check_label, is_location, label_of, locate
from aorta.analysis.metrics import metric_named
from aorta.analysis.report.launch_table import many_in, report_many
from aorta.analysis.table_files import FORMATS, check_format
from aorta.command_line import command, to_stderr, to_stdout
from aorta.errors import EXIT_OK, InputError, meant
from aorta.installation import checkout
from aorta.loggers import NAMES, Place, missing_client, open_logger
from aorta.records.run_files import REPORT_EVENTS
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
    many = many_in(options.sources[0]) if len(options.sources) == 1 else None
    if many is not None:
        to_stdout(report_many(many, options, rules))
        return EXIT_OK
    _name_sides(options)
    if options.fail_on and (options.reference is None or options.candidate is None):
        raise InputError("--fail-on judges a difference: give --reference and --candidate")
    if options.tables is not None:
        check_format(options.tables)
    if options.log and (problem := missing_client(options.log)) is not None:
        raise InputError(f"--log {','.join(options.log)}: {problem}")
    sources = _sources(options, checkout() or Path.cwd())
    output = Path(options.output) if options.output else _default_output(options, sources)
    engine = _engine(options)
    from aorta.analysis.report.report_folder import write_report

    style = style_of(sys.stdout)
    report = write_report(
        sources,
        output,
        options.reference,
        options.candidate,
        engine=engine,
        comm_patterns=options.comm_pattern,
        rules=rules,
        finish=partial(judge, options),
        html=options.html,
        brief=not options.all,
        style=style,
        tables=options.tables,
    )
    code, decided = run_gate(options, report.content, style)
    more = "" if options.all else f"More: {_command(arguments)} --all"
    blocks = [report.text, decided, more, "" if options.fail_on else _next(arguments, report.content, rules)]
    to_stdout(("\n\n" if options.all else "\n").join(filter(None, blocks)))
    try:
        _log_summary(report.content, options.log, output)
    except InputError as error:
        if not code:
            raise
        to_stderr(f"{style_of(sys.stderr).error('error:')} {error}")  # the gate's answer stays the exit code
    return code


def _next(arguments: Sequence[str], summary: Summary, rules: Rules) -> str:
    """Return what to do after a report: hold the verdict in continuous integration, which fails on a change for the
    worse that is larger than the margin; or get a verdict; empty for one source.
    """
    comparison = known(summary.comparison)
    if comparison is None or not is_comparable(comparison):
        return ""
    if not comparison.tested:
        return "Next: repeated launches, from which a verdict can come: aorta ab --help"
    if known(comparison.metrics[comparison.deciding].verdict) is None:
        return ""  # a gate could not decide either
    primary = metric_named(rules.primary)
    size = f"{rules.margin:g}" if primary.unit == "ratio" else f"{100 * rules.margin:g}%"
    limit = f"{rules.primary}{'<-' if primary.better == 'higher' else '>'}{size}"
    return f"Next: as a gate in CI: {_command(arguments)} {shlex.join(['--fail-on', limit])}"


def _command(arguments: Sequence[str]) -> str:
    """Return the same command, to be copied and added to."""
    return shlex.join(["aorta", "report", *(word for word in arguments if word != "--all")])


def parser() -> argparse.ArgumentParser:
    """Return the arguments that the command takes."""
    parser = argparse.ArgumentParser(
        description="How well communication hid behind computation: numbers, pictures, and one run against another.",
        epilog="Without --log-dir a label L is looked up in the current directory, then in the checkout: artifacts_L/, "
        "artifacts_L/L/, artifacts/L/, then artifacts/ if its records are labelled L or were made on platform L; then "
        "L is a path. The folder of a run may be packed (.tar.gz, .tar, .zip). Wherever a run is named, traces of "
        "other tools may be: a file, folder, glob or URL of Kineto traces (.json, .json.gz, .tar.gz), "
        "rocprofv3 output (JSON, CSV, rocpd) or an nsys SQLite export, recognised by their "
        "content. A folder of several run folders is a launch set: each is one launch, and two sets get a verdict from "
        "four launches per side; single runs get numbers only. Files of an earlier report in the output folder are "
        "replaced. Exit codes: 0 done, 2 bad input, 3 gate failed, 4 the data cannot decide, 127 a package is missing.",
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
        help="print everything: all metrics, collectives, notes, files; otherwise the answer in at most 20 lines",
    )
    parser.add_argument(
        "--log-dir", action="append", default=[], metavar="PATH", help="run folder or traces; repeatable"
    )
    parser.add_argument("--label", action="append", default=[], metavar="NAME", help="its name; one per --log-dir")
    parser.add_argument("--reference", metavar="LABEL|PATH", help="what to compare with (CUDA, say)")
    parser.add_argument("--candidate", metavar="LABEL|PATH", help="what is judged (ROCm, say)")
    add_comm_pattern(parser)
    _add_rules(parser)
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
        "--tables",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"write tables of steps, collectives, metrics and kernels of traces too ({', '.join(FORMATS)}), "
        "to tables/ in the output folder; parquet needs pyarrow",
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        choices=NAMES,
        metavar="TOOL",
        help=f"give medians and verdicts to {', '.join(NAMES)}; repeatable; each is an extra (docs/loggers.md)",
    )
    add_gate_arguments(parser)
    return parser


def _add_rules(parser: argparse.ArgumentParser) -> None:
    """Add options of `compare.verdict.Rules`: how launch sets are judged; of single runs only what may be unlike."""
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


def _name_sides(options: argparse.Namespace) -> None:
    """Take one source as the reference, and two as reference and candidate; of the folder of an A/B its two sides.

    Raises:
        InputError: more than two, or sources beside options that name some.
    """
    options.nodes = {}
    if not options.sources:
        return
    if options.reference or options.candidate or options.log_dir or options.label:
        raise InputError(
            f"{' '.join(options.sources)}: sources are named by themselves (aorta report A B) or by options "
            "(--reference, --candidate, --log-dir with --label), not both"
        )
    runs = _joined(options.sources)
    if len(runs) > 2:
        raise InputError(
            f"{len(runs)} sources: aorta report takes one, or a reference and a candidate. Launches of one "
            "side belong into one folder; more datasets are named with --log-dir DIR --label NAME"
        )
    options.nodes = {words[0]: tuple(map(Path, words)) for words in runs if len(words) > 1}
    names = [words[0] for words in runs]
    sides = _sides_of_a_plan(names[0]) if len(options.sources) == 1 else None
    options.reference, options.candidate = sides or (*names, None)[:2]


def _joined(sources: Sequence[str]) -> list[list[str]]:
    """Put folders together that hold ranks of the same attempt of one run; any other source stands alone."""
    found: dict[object, list[str]] = {}
    for word in sources:
        header = next(iter(headers_in([Path(word)])), None)
        found.setdefault(word if header is None else (header.run_id, header.attempt), []).append(word)
    return list(found.values())


def _sides_of_a_plan(source: str) -> tuple[str, str] | None:
    """Return both sides in the folder of an A/B (`aorta ab`), given by path or by label; None: it is none."""
    for folder in (Path(source), Path(OUTPUTS, source)):
        reference, candidate = (folder / side for side in SIDES)
        if launch_folders(reference) and launch_folders(candidate):
            return str(reference), str(candidate)
    return None


def _engine(options: argparse.Namespace) -> Engine:
    """Return what reads the files.

    Raises:
        InputError: words that do not go together.
    """
    if options.jobs is not None and (options.jobs < 1 or options.scheduler is not None):
        raise InputError(f"--jobs {options.jobs}: at least 1, and not with --scheduler, whose workers read")
    return Local(options.jobs) if options.scheduler is None else Dask(options.scheduler)


def _sources(options: argparse.Namespace, root: Path) -> dict[str, Location]:
    """Map labels to folders, files, globs or URLs, as given. A path given as reference or candidate gets a label.

    Raises:
        InputError: no labels, labels that are unequal in number to the folders, doubled, unknown or not file names.
    """
    asked = [label for label in (options.reference, options.candidate) if label is not None]
    if not (options.log_dir or options.label):
        if not asked:
            raise InputError(
                "nothing to report on: name a run or traces (a label, folder or file), or two to compare; "
                "see aorta report --help"
            )
        return _asked_for(options, root)
    if len(options.log_dir) != len(options.label):
        raise InputError(
            f"--log-dir and --label counts must match: {len(options.log_dir)} --log-dir, {len(options.label)} --label"
        )
    labels = _distinct([check_label(label) for label in options.label])
    for label in asked:
        if label not in labels:
            hint = meant(label, labels, after=" ")
            raise InputError(f"{label!r} is not among the labels; {hint}known labels: {', '.join(labels)}")
    if options.reference is not None:
        _distinct(asked)
    return dict(zip(labels, options.log_dir, strict=True))


def _asked_for(options: argparse.Namespace, root: Path) -> dict[str, Location]:
    """Return what --reference and --candidate name, without --log-dir; each option becomes its label."""
    words = {side: getattr(options, side) for side in ("reference", "candidate") if getattr(options, side) is not None}
    here = Path.cwd()
    places = {side: word for side, word in words.items() if is_location(word, here, root)}
    labels = {side: label_of(word) if side in places else word for side, word in words.items()}
    if len(set(labels.values())) < len(labels):
        if not places:
            _distinct(list(labels.values()))
        labels = {side: f"{label}-{side}" if side in places else label for side, label in labels.items()}
    for side, label in labels.items():
        setattr(options, side, check_label(label))
    found = locate([labels[side] for side in words if side not in places], here, root)
    return {
        label: options.nodes.get(places[side], places[side]) if side in places else found[label]
        for side, label in labels.items()
    }


def _distinct(labels: list[str]) -> list[str]:
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"label {label!r} is given twice; every dataset needs a label of its own")
    return labels


def _default_output(options: argparse.Namespace, sources: Mapping[str, Location]) -> Path:
    """Return a folder named after the plan of which these are the sides, else after the labels."""
    places = [Path(place) for place in sources.values() if isinstance(place, str | Path)]
    if tuple(place.name for place in places) == SIDES and places[0].parent == places[1].parent != Path():
        return Path("reports", label_of(str(places[0].parent)))
    if options.reference is not None and options.candidate is not None:
        return Path("reports", f"{options.candidate}-vs-{options.reference}")
    return Path("reports", "-and-".join(sources))


def _log_summary(summary: Summary, names: Sequence[str], output: Path) -> None:
    """Open each logger for the report, give it everything, and close it.

    Args:
        summary: the content of `summary.json`.
        names: of `aorta.loggers`.
        output: folder of the report; loggers that write files write them there.

    Raises:
        InputError: a logger failed; the others have got everything.
    """
    compared = known(summary.comparison)
    title = "-and-".join(summary.datasets) if compared is None else _title(compared)
    facts = {
        f"{label}.{name}": value
        for label, entry in summary.datasets.items()
        for name in _LOGGED_FACTS
        if (value := getattr(entry.source, name)) is not None
    }
    failed = []
    for name in dict.fromkeys(names):
        try:
            with closing(open_logger(name, Place(output, title, facts, event_suffix=REPORT_EVENTS))) as logger:
                for label, values in _logged_values(summary):
                    logger.log_summary(label, values)
        except Exception as error:  # noqa: BLE001  a client may raise anything; it is raised below, by name
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise InputError(f"the report is written to {output}, but not every logger took it: {'; '.join(failed)}")


def _logged_values(summary: Summary) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Label and values for `Logger.log_summary`: `<metric>_median` of each dataset; of the comparison `verdict`,
    and per metric `<metric>_difference`, `<metric>_p` (the p that was judged) and `<metric>_verdict`. What is null is
    left out.
    """
    for label, entry in summary.datasets.items():
        medians = {f"{name}_median": each.median for name, each in entry.described.items()}
        yield label, _without_nulls({"rank_steps": entry.count, **medians})
    compared = known(summary.comparison)
    if compared is not None:
        values: dict[str, Any] = {"verdict": compared.verdict, "verdict_reason": compared.verdict_reason}
        for name, each in compared.metrics.items():
            values |= {f"{name}_difference": each.difference}
            corrected = known(each.p_corrected)
            values |= {f"{name}_p": known(each.p) if corrected is None else corrected}
            values |= {f"{name}_verdict": known(each.verdict)}
        yield _title(compared), _without_nulls(values)


def _title(compared: Comparison) -> str:
    return f"{compared.candidate}-vs-{compared.reference}"


def _without_nulls(values: Mapping[str, Any]) -> dict[str, float | str]:
    return {name: value for name, value in values.items() if value is not None}
