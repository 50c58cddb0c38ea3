"""The command `aorta` (also `python -m aorta`), which finds a command of its own parser and help text; `aorta record`;
and completion in bash, zsh and fish, by argcomplete.

    aorta train label=cuda        aorta report cuda rocm        aorta --help
    eval "$(register-python-argcomplete aorta)"        # docs/running.md has the lines for each shell

Must not import what the chosen command does not need: `aorta --help` takes no second, and neither `aorta report` nor a
completion loads torch. Must not change what a recorded command does: its exit code and signals are its own.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_type_hints

from aorta.command_line import begin_process, command, to_stderr, to_stdout
from aorta.errors import EXIT_OK, ConfigError, InputError, ToolMissing, meant
from aorta.installation import check_alone, with_path
from aorta.version import __version__

_INJECTED: Final = Path(__file__).resolve().parent / "recording" / "injected"
_OPTIONS: Final = re.compile(r"-([bBdEhiIOPqRsStuvVx?]*)([cmWX]?)(.*)", re.DOTALL)
"""A word of Python's options: flags, an option with an argument, and the argument if it is not the next word."""
_IGNORES_PATH: Final = frozenset("IES")
"""With these Python reads no PYTHONPATH (-I, -E) or no sitecustomize (-S)."""
_NOTE: Final = """nothing is recorded of `{}`, started at {:%Y-%m-%d %H:%M:%S} UTC on {}:
no process of it made two steps of a torch optimizer, or AORTA was hidden from it, by Python's -I, -E or -S or by a
PYTHONPATH that was set anew
"""
_TRAIN: Final = (
    ("--nproc_per_node", "ranks on this machine"),
    ("--config", "a YAML file to build on"),
    ("--cfg", "print the configuration: job, hydra or all"),
    ("--info", "what Hydra knows"),
    ("--version", "AORTA's version"),
)


@dataclass(frozen=True)
class Command:
    """One of the commands.

    Attributes:
        entry: `module:function` that takes the arguments and returns the exit code.
        parser: that module's function that makes the parser; None: the command takes keys of a configuration.
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


COMMANDS: Final[dict[str, Command]] = {
    "demo": Command(
        "aorta.experiments.plan_command:demo",
        "a verdict in about two minutes, without a GPU: overlap on against overlap off",
        "",
        "demo_parser",
    ),
    "train": Command(
        "aorta.train_command:main",
        "train with telemetry",
        "--nproc_per_node 2 label=cuda training.max_steps=40",
        parser=None,
    ),
    "record": Command(
        "aorta.commands:record",
        "record the training that a command starts, without a line in its script",
        "artifacts/mine -- torchrun --nproc_per_node 2 train.py",
        "record_parser",
    ),
    "report": Command(
        "aorta.report.command:overlap_report",
        "numbers, pictures and a page about one run, or one against another",
        "cuda rocm",
    ),
    "whatif": Command(
        "aorta.report.run_commands:whatif_command",
        "what a run would have measured with another network, no straggler, more ranks",
        "cuda --set network.bandwidth=x2",
        "whatif_parser",
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
        "aorta.report.run_commands:kernels_command",
        "kernels of traces by time, slowed down by communication, launch gaps",
        "cuda_traces --top 30",
        "kernels_parser",
    ),
    "merge": Command(
        "aorta.merge.merge_traces:merge_traces",
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

REMOVED: Final[dict[str, dict[str, str]]] = {
    "ab": {
        "--env": "write env.NAME=VALUE",
        "--python": "write python=FILE",
        "--tree": "write tree=DIR",
        "--launcher": "write launcher=COMMAND",
        "--seed": "write training.seed=N",
        "--torchrun": "write launcher='{torchrun} --max-restarts 0'",
    },
    "autopsy": {"--stuck-after": "look again when the ranks have stood still for 10 s"},
    "check-gpu": {
        "--strategies": "write parallel=ddp,fsdp",
        "--ranks-per-device": "write training.ranks_per_device=2",
    },
    "demo": dict.fromkeys(("--output", "--report"), "it writes to artifacts/demo and reports/demo of this folder"),
    "report": {"--tables": "in Python: aorta.analysis.steps(RUN).to_csv('steps.csv')"},
}
"""Command -> an option that it does not have, or no longer -> what does it."""


def carry_out(name: str, words: Sequence[str]) -> int:
    """Run a command; returns its exit code. Raises InputError for an option of `REMOVED`."""
    for word in words[: words.index("--")] if "--" in words else words:
        option = word.partition("=")[0]
        if (instead := REMOVED.get(name, {}).get(option)) is not None:
            raise InputError(f"{option}: aorta {name} has no such option; {instead}")
    module, _, function = COMMANDS[name].entry.partition(":")
    ended: int = getattr(import_module(module), function)(words)
    return ended


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 the configuration cannot be run, 2 bad arguments or input, and
    others that the command's help lists. A command's parser raises SystemExit.

    Args:
        arguments: the command line after `aorta`; None: the process's.
    """
    if arguments is None:
        begin_process()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks how the line could go on
        complete(os.environ.get("COMP_LINE", ""))
    check_alone()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help", "help"}:
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:<{width}}  {entry.purpose}" for name, entry in COMMANDS.items())
        examples = "\n".join(f"  aorta {name} {entry.example}".rstrip() for name, entry in COMMANDS.items())
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
        return carry_out(name, rest)
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
    return carry_out(name, sys.argv[1:])


@command()
def record(arguments: Sequence[str]) -> int:
    """Become a command whose training is recorded without a line in its script. Returns only by an error: InputError
    where there is no command, Python would ignore PYTHONPATH or the folder cannot be written, ToolMissing where it
    cannot be started.
    """
    if "--" not in arguments and len(arguments) > 1 and not any(word.startswith("-") for word in arguments[:2]):
        folder, *words = arguments
        raise InputError(f"put -- before the command: aorta record {shlex.join([folder, '--', *words])}")
    index = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = record_parser().parse_args(arguments[:index]), list(arguments[index + 1 :])
    if not words:
        raise InputError("there is no command; it follows two dashes: aorta record OUT -- torchrun train.py")
    if re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        following = iter(words[1:])
        for option in following:
            given = _OPTIONS.fullmatch(option)
            if given is None or not (given[1] or given[2]):
                break
            if _IGNORES_PATH & set(given[1]):
                raise InputError(f"{words[0]} {option}: hides PYTHONPATH from Python, and so AORTA; leave it out")
            if given[2] in ("c", "m"):  # what follows is the program's
                break
            if given[2] and not given[3]:
                next(following, None)
    from aorta.config.loop import observed_every
    from aorta.records.files import write_whole
    from aorta.records.run_files import NOTE_FILE
    from aorta.redaction import hide

    try:
        observed_every(options.every)
    except ConfigError as error:
        raise InputError(f"aorta record --every: {error}") from error
    every = {} if options.every == "1" else {"AORTA_RECORD_EVERY": options.every}
    out = Path(options.folder)
    sys.stdout.flush()
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Why nothing of the command is recorded: it holds until something is.
        write_whole(out / NOTE_FILE, _NOTE.format(shlex.join(hide(words)), datetime.now(UTC), platform.node()))
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}; choose another OUT") from error
    try:
        os.execvpe(words[0], words, with_path(_INJECTED) | {"AORTA_RECORD": str(out.absolute())} | every)
    except OSError as error:
        raise ToolMissing(f"{words[0]}: cannot be started: {error.strerror or error}") from error


def record_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Record the training that a command starts, without a line in its script (docs/your-loop.md).",
        usage="%(prog)s [--every N] OUT -- COMMAND ...",
        epilog="Ends as the command does.",
    )
    parser.add_argument("folder", metavar="OUT", help="folder of the run; an earlier one in it is kept in its history/")
    parser.add_argument(
        "--every",
        metavar="N",
        default="1",
        help="observe one of every N steps, drawn at random; auto: N at which AORTA takes 0.1 %% of the time",
    )
    return parser


def complete(line: str) -> None:
    """Write the completions that the shell has asked for, and end the process. `line`: the command line up to now."""
    import argcomplete

    whole = ArgumentParser(prog="aorta")
    whole.add_argument("--version", action="store_true")
    commands = whole.add_subparsers()
    words = line.split()[1:]
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    for name, entry in COMMANDS.items():
        if name not in words:
            commands.add_parser(name)
        elif entry.parser is None:
            training = commands.add_parser(name)
            for option, purpose in _TRAIN:
                training.add_argument(option, help=purpose)
            keys = training.add_argument("overrides", nargs="*")
            keys.completer = lambda **_: list(overrides(chosen))  # type: ignore[attr-defined]  # for argcomplete
        else:
            commands.add_parser(name, parents=[entry.options()], add_help=False, conflict_handler="resolve")
    argcomplete.autocomplete(whole, always_complete_options=False)


def overrides(chosen: Mapping[str, str]) -> Iterator[str]:
    """Yield `key=` of every key, and `key=value` where the values are known; of groups that are `chosen` on the line,
    keys of that option alone.
    """
    from aorta.config import CONFIG_DIR
    from aorta.config.schema import GROUPS, Config

    yield from (f"experiment={path.stem}" for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml")))
    for group, options in GROUPS.items():
        yield from (f"{group}={option}" for option in options)
        kinds = [options[chosen[group]]] if chosen.get(group) in options else list(options.values())
        for kind in dict.fromkeys(kinds):
            yield from _keys(kind, f"{group}.")
    yield from _keys(Config, "")


def _keys(kind: type[Any], prefix: str) -> Iterator[str]:
    from aorta.config.schema import GROUPS, NAMES

    hints = get_type_hints(kind)
    for field in fields(kind):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        types = [part for part in parts if isinstance(part, type)]
        if key in GROUPS or key in NAMES:
            continue
        section: Any = field.default_factory
        if isinstance(section, type) and is_dataclass(section):
            yield from _keys(section, f"{key}.")
            continue
        values = [member.name for part in types if issubclass(part, Enum) for member in part]
        values += ("true", "false") if bool in types else ()
        yield from (f"{key}={value}" for value in values)
        if not values:
            yield f"{key}="
