"""The command `aorta record`: becomes any command, so that the training in it is recorded without a line in its script.

Must not import torch, change what the command does, or stay in its way: its exit code and signals are its own.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from aorta.command_line import command
from aorta.errors import InputError, ToolMissing

_INJECTED: Final = str(Path(__file__).resolve().parent / "runner" / "injected")
_IGNORES_PATH: Final = re.compile(r"-[A-Za-z]*[IES]")
"""Options with which Python reads no PYTHONPATH (-I, -E) or no sitecustomize (-S)."""


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `aorta record`: become the command. Returns only by an error.

    Raises:
        InputError: there is no command, or Python would not see that it is recorded. ToolMissing: it cannot be started.
    """
    place = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser().parse_args(arguments[:place]), list(arguments[place + 1 :])
    if not words:
        raise InputError("there is no command; it follows two dashes: aorta record OUT -- torchrun train.py")
    if re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        for option in takewhile(lambda word: word.startswith("-"), words[1:]):
            if _IGNORES_PATH.match(option):
                raise InputError(f"{words[0]} {option}: hides PYTHONPATH from Python, and so AORTA; leave it out")
    path = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != _INJECTED]
    folder = str(Path(options.folder).absolute())
    variables = {"PYTHONPATH": os.pathsep.join([_INJECTED, *path]), "AORTA_RECORD": folder}
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, os.environ | variables)
    except OSError as error:
        raise ToolMissing(f"{words[0]}: cannot be started: {error.strerror or error}") from error


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Record the training that a command starts, without a line in its script (docs/your-loop.md).",
        usage="%(prog)s OUT -- COMMAND ...",
        epilog="Ends as the command does.",
    )
    parser.add_argument("folder", metavar="OUT", help="folder of the run; an earlier one in it is kept in its history/")
    return parser
