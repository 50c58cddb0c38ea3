"""The command `aorta record`: starts any command so that the training in it is recorded, without a line in its script.

Must not import torch, change what the command does, or stay: the process becomes the command, with its exit code and
its signals.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from aorta.command_line import command
from aorta.errors import InputError, ToolMissing
from aorta.records.schema import InstrumentMode

_INJECTED: Final = Path(__file__).resolve().parent / "runner" / "injected"
_PYTHON: Final = re.compile(r"python[\d.]*")
_IGNORES_PATH: Final = re.compile(r"-[A-Za-z]*[IES]")
"""Options with which Python reads no PYTHONPATH (-I, -E) or no sitecustomize (-S)."""


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `aorta record`: become the command. Returns only by an error.

    Raises:
        InputError: there is no command, or Python would not see that it is to be recorded. ToolMissing: it cannot be
            started.
    """
    place = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser().parse_args(arguments[:place]), list(arguments[place + 1 :])
    if not words:
        raise InputError("there is no command; it follows two dashes: aorta record OUT -- torchrun train.py")
    _refuse_blind_python(words)
    asked = {name: value for name, value in vars(options).items() if value is not None}
    asked["folder"] = str(Path(options.folder).absolute())
    path = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != str(_INJECTED)]
    variables = {"PYTHONPATH": os.pathsep.join([str(_INJECTED), *path]), "AORTA_RECORD": json.dumps(asked)}
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, os.environ | variables)
    except OSError as error:
        raise ToolMissing(f"{words[0]}: cannot be started: {error.strerror or error}") from error


def _refuse_blind_python(words: Sequence[str]) -> None:
    if not _PYTHON.fullmatch(Path(words[0]).name):
        return
    for word in words[1:]:
        if not word.startswith("-"):
            return
        if _IGNORES_PATH.match(word):
            raise InputError(
                f"{words[0]} {word}: this Python would ignore PYTHONPATH, through which aorta record reaches the "
                "program; leave -I, -E and -S out, or put aorta.record into the loop"
            )


def parser() -> argparse.ArgumentParser:
    """Return the arguments that the command takes."""
    parser = argparse.ArgumentParser(
        description="Record the training that a command starts, without a line in its script (docs/your-loop.md).",
        usage="%(prog)s [OPTION ...] OUT -- COMMAND ...",
        epilog="Ends as the command does. Exit codes of its own: 2 there is no command, or its Python would not see "
        "AORTA, 7 it cannot be started.",
    )
    parser.add_argument("folder", metavar="OUT", help="folder of the run; an earlier one in it is kept in its history/")
    parser.add_argument("--label", help="name of the run in reports (default: the platform)")
    parser.add_argument("--mode", choices=get_args(InstrumentMode), help="as aorta.record(mode=...)")
    parser.add_argument("--warmup-steps", type=int, metavar="N", help="first recorded steps that reports leave out")
    return parser
