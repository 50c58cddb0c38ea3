"""The command `aorta autopsy`: why a run or a job hangs, from its progress files or dumps of torch's Flight Recorder.

Must not load torch or pandas, or touch a process unless `--live` asks it to.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from aorta.autopsy.flight_recorder import no_evidence
from aorta.autopsy.report import as_json, evidence_of, has_saved_evidence, read_ras, verdict_on, verdict_text
from aorta.command_line import command, to_stdout
from aorta.errors import EXIT_OK, GateFailed, Inconclusive, InputError
from aorta.terminal_style import style_of


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `aorta autopsy`; returns its exit code. Raises InputError without evidence, or of several jobs."""
    options = parser().parse_args(arguments)
    paths = [_located(word) for word in options.paths]
    evidence = evidence_of(paths, live=options.live)
    if options.ras is not None:
        evidence += read_ras(options.ras, evidence)
    watched = not options.live and any(map(has_saved_evidence, paths))
    verdict = verdict_on(evidence, watched=watched)
    if options.json:
        to_stdout(as_json(verdict).rstrip())
    else:
        to_stdout(verdict_text(verdict, style_of(sys.stdout), stacks=options.stacks))
    if verdict.kind in ("not_stuck", "slow"):
        return EXIT_OK
    if all(source.is_unreadable for source in evidence):
        return InputError.exit_code
    return Inconclusive.exit_code if verdict.kind == "cannot_decide" else GateFailed.exit_code


def _located(word: str) -> Path:
    """Return a path, or the run folder of a label."""
    if "://" in word:
        raise InputError(f"{word}: an autopsy reads folders of this machine; copy that one here")
    path = Path(word)
    if os.path.exists(path):  # noqa: PTH110 - which is no error for a word too long to be a name
        return path
    from aorta.read.locations import is_location, locate

    if is_location(word, Path.cwd(), Path.cwd()):
        raise InputError(no_evidence(path))
    return locate([word], Path.cwd(), Path.cwd())[word]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Say which rank of a job that hangs is the cause, which collective the others wait in, and why "
        "(docs/autopsy.md).",
        epilog="Exit codes: 0 nothing is stuck, 2 there is no evidence or it cannot be read, 3 a cause was found, "
        "4 the evidence does not decide.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="RUN|DUMP",
        help="a run folder or its label; or dumps of torch's Flight Recorder, or a folder of them",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON (docs/schemas)")
    parser.add_argument("--stacks", action="store_true", help="print the stack of every rank that left one")
    parser.add_argument(
        "--live",
        action="store_true",
        help="look at the ranks of this host now, and ask each for its stack; they go on as before",
    )
    parser.add_argument(
        "--ras",
        metavar="FILE|HOST:PORT",
        help="what NCCL's RAS says of the processes (JSON), or its port to ask, as localhost:28028",
    )
    return parser
