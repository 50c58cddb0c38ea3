"""The command-line options of the gate: parse them, judge the conditions, write the result files.

Adds options to a parser, later puts `gate` into a summary and returns an exit code and text. Must not: import pandas;
conditions are parsed together with the other arguments.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aorta.analysis.documents.summary import Summary
from aorta.analysis.gate.gate_checks import Condition, GateResult, evaluate, parse_condition
from aorta.analysis.gate.gate_outputs import gate_text, junit_xml, markdown_summary
from aorta.errors import EXIT_OK, InputError
from aorta.terminal_style import PLAIN, Style


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--fail-on`, `--inconclusive`, `--junit` and `--markdown`. A malformed condition ends the command with exit
    code 2 before anything is read.
    """
    group = parser.add_argument_group("gate", "exit code 3 if the candidate fails, 4 if the data cannot decide")
    group.add_argument(
        "--fail-on",
        action="append",
        default=[],
        type=_condition,
        metavar="METRIC<NUMBER",
        help="fail where candidate - reference is below NUMBER (or above it: METRIC>NUMBER), in the metric's unit; "
        "NUMBER%% is a part of the reference; repeatable",
    )
    group.add_argument(
        "--inconclusive",
        choices=("4", "pass", "fail"),
        default="4",
        help="what a gate ends with that cannot decide (default: exit code 4)",
    )
    group.add_argument("--junit", metavar="FILE", help="write the gate's result as JUnit XML")
    group.add_argument(
        "--markdown", metavar="FILE", help="append a summary in Markdown, as $GITHUB_STEP_SUMMARY wants it"
    )


def check_gate_options(options: argparse.Namespace) -> None:
    """Check the options against each other; to be called before anything is read.

    Raises:
        InputError: there are conditions but nothing to compare, or an option that needs a condition has none.
    """
    if options.fail_on and (options.reference is None or options.candidate is None):
        raise InputError("--fail-on judges a difference: give --reference and --candidate")
    if not options.fail_on and options.junit is not None:
        raise InputError("--junit writes the result of a gate: give at least one --fail-on")
    if not options.fail_on and options.inconclusive != "4":
        raise InputError(f"--inconclusive {options.inconclusive} is for a gate: give at least one --fail-on")


def judge(options: argparse.Namespace, summary: Summary) -> GateResult | None:
    """Judge the conditions and put the result into the summary as `gate`. Without a condition returns None and adds no
    key.
    """
    if not options.fail_on:
        return None
    result = evaluate(options.fail_on, summary.comparison, options.inconclusive)
    summary.gate = result.entry()
    return result


def run_gate(
    options: argparse.Namespace, summary: Summary, result: GateResult | None, style: Style = PLAIN
) -> tuple[int, str]:
    """Write the files of `--junit` and `--markdown`.

    Args:
        result: what `judge` returned for this summary.
        style: of the text.

    Returns:
        The exit code, and the text for the terminal (empty without a gate).

    Raises:
        InputError: a file cannot be written.
    """
    written: list[str] = []
    if result is not None and options.junit is not None:
        _write(options.junit, junit_xml(result, summary.comparison), "w", "--junit")
        written.append(options.junit)
    if options.markdown is not None:
        _write(options.markdown, markdown_summary(summary, result), "a", "--markdown")
        written.append(options.markdown)
    if result is None:
        return EXIT_OK, "\n".join(written)
    return result.exit_code, "\n".join([gate_text(result, style), *written])


def _condition(text: str) -> Condition:
    try:
        return parse_condition(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _write(name: str, text: str, mode: str, option: str) -> None:
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(
            f"{name}: cannot be written: {error.strerror or error}. Give another file to {option}"
        ) from error
