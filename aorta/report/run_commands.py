"""The commands that print an answer about one run and write no file: `aorta whatif` and, of traces, `aorta kernels`.

Without a change `aorta whatif` prints what there is to gain. Must not define what is predicted, or compute a number.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from aorta.command_line import command, to_stdout
from aorta.documents import as_json
from aorta.documents.formatting import TEXT, rough_interval, rough_ms
from aorta.errors import EXIT_OK, InputError
from aorta.installation import checkout
from aorta.read.engines import Local
from aorta.read.locations import is_location, locate
from aorta.read.traces.interval_table import add_comm_pattern
from aorta.report.text import gain_block, kernel_block
from aorta.terminal_style import style_of, table, wrapped
from aorta.whatif.changes import FORMS, is_count, parse_changes
from aorta.whatif.prediction import Prediction, Value, base_of, gains, predict_from
from aorta.whatif.read_program import read_program


@command()
def whatif_command(arguments: Sequence[str]) -> int:
    """Run `aorta whatif`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = whatif_parser().parse_args(arguments)
    changes = parse_changes(options.set)
    if len({change.text for change in changes}) < len(changes):
        raise InputError(f"--set {' '.join(options.set)}: a change is given twice")
    word = options.run
    base = base_of(read_program(_source_of(word), last=options.last))
    style = style_of(sys.stdout)
    if changes:
        predicted = predict_from(base, changes)
        content, text = predicted.as_json(), wrapped(prediction_lines(predicted), style.width, indent="  ")
    else:
        last = "" if options.last is None else f" --last {options.last}"
        answer = gains(base, ask=f"aorta whatif {shlex.quote(word)}{last}")
        content, text = as_json(answer), gain_block(word, answer, style)
    to_stdout(json.dumps(content, indent=2) if options.json else text)
    return EXIT_OK


def _source_of(word: str) -> str | Path:
    """Return the files that a word names, or the folder of the run with that label."""
    here = Path.cwd()
    root = checkout() or here
    return word if is_location(word, here, root) else locate([word], here, root)[word]


def prediction_lines(predicted: Prediction) -> list[str]:
    base, gain = predicted.identity, predicted.gain_ms
    shorter = gain.value >= 0
    by = (gain.value, gain.low, gain.high) if shorter else (-gain.value, -gain.high, -gain.low)

    def change(now: str, value: Value | None, factor: float, unit: str) -> str:
        if value is None:
            return TEXT.unknown
        return f"{now} -> {rough_interval(factor * value.value, factor * value.low, factor * value.high, unit)}"

    exposed_ms = base.replayed_exposed_ms
    rows = [
        (
            "job step",
            f"{'at most ' if predicted.upper_bound else ''}{rough_interval(*by)} {'shorter' if shorter else 'longer'}, "
            f"{TEXT.percent(abs(gain.value) / base.replayed_ms)} of {rough_ms(base.replayed_ms)}"
            f"{', contention ignored' if predicted.real_network else ''}",
        ),
        ("overlap ratio", change(TEXT.percent(base.replayed_ratio), predicted.overlap_ratio, 100, "%")),
        (
            "exposed communication",
            change(TEXT.unknown if exposed_ms is None else rough_ms(exposed_ms), predicted.exposed_comm_ms, 1, "ms"),
        ),
    ]
    return [
        f"with {', '.join(predicted.changes)}:",
        *table(rows, indent="  "),
        f"95 % intervals cover the variation over {predicted.steps} recorded steps and the model's error; two launches "
        "differ by more",
        *([] if (problem := base.problem()) is None else [f"check: {problem}"]),
        *(f"note: {note}" for note in predicted.notes),
    ]


def whatif_parser() -> argparse.ArgumentParser:
    """Return the arguments that `aorta whatif` takes."""
    words = argparse.ArgumentParser(
        description="What if something had been different? A prediction from the record of one run "
        "(docs/what-if.md). What a launch can be given is measured: aorta ab.",
        epilog="Exit codes: 0 done, 2 bad input, or no prediction is possible. A change is one of: "
        + "; ".join(FORMS.values()),
    )
    words.add_argument("run", metavar="LABEL|DIR", help="the run: its label, its folder or an archive of it")
    words.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TARGET=VALUE",
        help="change something; repeatable: applied together. Without it: what there is to gain",
    )
    words.add_argument("--last", type=_positive, metavar="N", help="replay the last N steps only (default: all)")
    words.add_argument("--json", action="store_true", help="everything, as JSON")
    return words


def _positive(text: str) -> int:
    if not is_count(text) or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 2")
    return int(text)


@command()
def kernels_command(arguments: Sequence[str]) -> int:
    """Run `aorta kernels`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = kernels_parser().parse_args(arguments)
    if options.top < 1:
        raise InputError(f"--top {options.top}: at least 1")
    from aorta.read.traces.load import load_traces

    run = load_traces(str(_source_of(options.traces)), Local(), options.comm_pattern)
    assert run.traces is not None, "load_traces gives them"
    block = kernel_block(options.traces, run.traces, style_of(sys.stdout), options.top)
    to_stdout("\n".join([block, *(f"  ! {note}" for note in run.health.notes)]))
    return EXIT_OK


def kernels_parser() -> argparse.ArgumentParser:
    """Return the arguments that `aorta kernels` takes."""
    parser = argparse.ArgumentParser(
        description="Kernels by total time, what communication slows down, and gaps between kernels (docs/traces.md).",
        epilog="Exit codes: 0 done, 2 bad input.",
    )
    parser.add_argument("traces", metavar="TRACES", help="a file, folder, glob or URL, or the label of a run")
    parser.add_argument(
        "--top", type=int, default=15, metavar="N", help="rows of each kind to print (default: %(default)s)"
    )
    add_comm_pattern(parser)
    return parser
