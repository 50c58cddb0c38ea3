"""The command `aorta` (also `python -m aorta`): one name for everything that AORTA does.

    aorta train label=cuda        aorta report cuda rocm        aorta --help

Each command has a parser and a help text of its own; this one only finds it. Must not import what the chosen command
does not need: `aorta --help` takes no second, and `aorta report` never loads torch.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from aorta.command_line import begin_process, command, to_stderr, to_stdout
from aorta.errors import EXIT_OK, InputError, meant
from aorta.installation import check_alone
from aorta.version import __version__

_Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Command:
    """One of the commands.

    Attributes:
        entry: `module:function` that takes the arguments behind the command's name and returns the exit code.
        parser: the function of that module that makes the parser; None: the command takes keys of a configuration.
        purpose: what it is for, in one line.
        example: arguments that work.
    """

    entry: str
    purpose: str
    example: str
    parser: str | None = "parser"

    def options(self) -> ArgumentParser:
        made: ArgumentParser = getattr(import_module(self.entry.partition(":")[0]), str(self.parser))()
        return made

    def load(self) -> _Main:
        module, _, function = self.entry.partition(":")
        main: _Main = getattr(import_module(module), function)
        return main


COMMANDS: Final[dict[str, Command]] = {
    "demo": Command(
        "aorta.experiments.plan_command:demo",
        "a verdict in about a minute, without a GPU: overlap on against overlap off",
        "",
        "demo_parser",
    ),
    "train": Command(
        "aorta.train_command:main",
        "train with telemetry, or sweep with -m",
        "--nproc_per_node 2 label=cuda training.max_steps=40",
        parser=None,
    ),
    "record": Command(
        "aorta.record_command:main",
        "record the training that a command starts, without a line in its script",
        "artifacts/mine -- torchrun --nproc_per_node 2 train.py",
    ),
    "report": Command(
        "aorta.analysis.report.report_command:overlap_report",
        "numbers, pictures and a page about one run, or one against another",
        "cuda rocm",
    ),
    "whatif": Command(
        "aorta.analysis.whatif.whatif_command:main",
        "what a run would have measured with another network, no straggler, other buckets, ...",
        "cuda --set network.bandwidth=x2",
    ),
    "ab": Command(
        "aorta.experiments.plan_command:main",
        "launch configurations in turn, so that the report can give verdicts and name the best",
        "--output artifacts/ab --candidate parallel.overlap=false training.max_steps=40",
    ),
    "autopsy": Command(
        "aorta.autopsy_command:main",
        "why a job hangs: which rank, in which collective, and what the others wait for",
        "/tmp/dumps",
    ),
    "kernels": Command(
        "aorta.analysis.report.kernels:main",
        "kernels of traces by time, slowed down by communication, GEMMs, launch gaps",
        "cuda_traces --top 30",
    ),
    "merge": Command(
        "aorta.analysis.merge.merge_traces:merge_traces",
        "traces or records of several ranks as one file for Perfetto, on one clock",
        "artifacts/cuda -o merged.json.gz",
    ),
    "rpc": Command(
        "aorta.rpc.rpc_report:rpc_report",
        "the calls of an RPC run as a table and a trace",
        "artifacts",
    ),
    "check-gpu": Command(
        "aorta.gpu_check.check_command:main",
        "is the telemetry right and cheap on this machine's devices?",
        "",
    ),
}


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 the configuration cannot be run, 2 bad arguments or input, and
    others that the command's own help lists.

    Args:
        arguments: the command line behind `aorta`; None: the process's.

    Raises:
        SystemExit: from a command's own parser.
    """
    if arguments is None:
        begin_process()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks how the line could go on
        from aorta.completion import complete

        parsers = {name: one.options if one.parser else None for name, one in COMMANDS.items()}
        complete(parsers, os.environ.get("COMP_LINE", ""))
    check_alone()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help", "help"}:
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:<{width}}  {one.purpose}" for name, one in COMMANDS.items())
        examples = "\n".join(f"  aorta {name} {one.example}".rstrip() for name, one in COMMANDS.items())
        to_stdout(
            "usage: aorta COMMAND [ARGUMENT ...]\n\n"
            "How well communication hides behind computation in distributed PyTorch training.\n\n"
            f"commands\n{commands}\n\nexamples\n{examples}\n\n"
            "aorta COMMAND --help explains a command; aorta --version prints AORTA's version."
        )
        return EXIT_OK
    if words[0] in {"-V", "--version"}:
        to_stdout(f"aorta {__version__}")
        return EXIT_OK
    name, *rest = words
    if name not in COMMANDS:
        hint = meant(name, COMMANDS, after=" ")
        raise InputError(f"aorta {name}: no such command; {hint}there are {', '.join(COMMANDS)}; see aorta --help")
    sys.argv = [f"aorta {name}", *rest]  # what the command's parser calls itself
    chosen = COMMANDS[name]
    try:
        return chosen.load()(rest)
    except SystemExit as ended:  # argparse's, which names a word it does not know and no other
        if ended.code == InputError.exit_code and chosen.parser is not None:
            known = re.findall(r"--[\w-]+", chosen.options().format_help())
            for word in rest:
                option = word.partition("=")[0]
                if option.startswith("--") and option not in known and (hint := meant(option, known)):
                    to_stderr(f"{option}: {hint}")
        raise
    finally:
        if rest in (["-h"], ["--help"]):
            to_stdout(f"\nExample: aorta {name} {chosen.example}".rstrip())


@command()
def script(name: str) -> int:
    """Carry out one command for a script of the checkout, with the process's arguments; returns the exit code."""
    begin_process()
    return COMMANDS[name].load()(sys.argv[1:])
