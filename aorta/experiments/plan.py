"""What a plan is (its sides, how often each is launched, in which order, and the command line of each launch), and how
one is made of what a user gives, on the command line and perhaps in a YAML file.

`launch_engine` carries it out. Must not start anything, or take a word that would undo the plan (a label, an output
folder).
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.documents.comparison import SIDES
from aorta.documents.plans import TORCHRUN, Side
from aorta.errors import ConfigError, InputError
from aorta.installation import checkout, training_program
from aorta.records.run_files import check_variable
from aorta.redaction import hide

REFERENCE, CANDIDATE = SIDES
PLACEHOLDERS: Final = (TORCHRUN, "{python}", "{tree}", "{plan}", "{output}", "{side}", "{launch}")
"""What words of a launcher or a command may hold: the side's torchrun, its interpreter, its checkout, the plan folder,
the run folder of the launch, the side's name, the number of the launch.
"""
LAUNCHES: Final = 5
"""A side. The smallest two-sided p of Mann-Whitney's U is then 2 / C(10, 5) = 0.0079 (docs/dev/measuring.md, section
5)."""
LAUNCH_KEYS: Final = ("command", "python", "launcher", "tree")
"""Words of a side that are no overrides: how its launches are started."""
VARIABLE: Final = "env."
"""What a key begins with that names an environment variable."""
MOST_CANDIDATES: Final = 64
_NOT_WORDS: Final = frozenset(
    {"-m", "--multirun", "-c", "--cfg", "-h", "--help", "--hydra-help", "--info", "-i", "--resolve", "-r", "--run"}
)
_LISTS: Final = frozenset({"words", "command", "launcher"})
"""Keys whose values are words, or a text that is taken apart as a shell would."""
_PLACED: Final = ("label", "training.output_dir", "training.start_step")
_PLACEHOLDER: Final = re.compile(r"(?<!\{)\{\w+\}(?!\})")


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch of a plan: its number among all, its side, and its number on that side; both from 0."""

    order: int
    side: Side
    number: int

    @property
    def name(self) -> str:
        """The folder of its run inside the plan folder: `candidate/03`."""
        return f"{self.side.name}/{self.number:02d}"

    @property
    def shown(self) -> str:
        """Its name; of one of several candidates with what it sets, secrets redacted: `candidate-2/00 (CAP=8)`."""
        settings = self.side.settings()
        return f"{self.name} ({settings})" if self.side.name.startswith("candidate-") and settings else self.name


@dataclass(frozen=True)
class Plan:
    """Everything that is launched.

    Attributes:
        output: the plan folder, absolute.
        folder: where the launches run, absolute; relative words are seen from it.
        launches: of each side.
        words: overrides for train.py in every launch, before the side's.
        timeout_s: a launch that lasts longer is ended, and failed.
        aa: both sides are the reference.
    """

    output: Path
    folder: Path
    sides: tuple[Side, ...]
    launches: int
    words: tuple[str, ...] = ()
    nproc_per_node: int = 2
    timeout_s: float | None = None
    aa: bool = False

    def order(self) -> Iterator[PlannedLaunch]:
        """Yield the launches in the order A B B A A B B A ...: a drift of the machine that is linear in time falls on
        both sides alike (docs/dev/measuring.md, section 5). One side: one launch after the other.
        """
        position = 0
        for number in range(self.launches):
            for side in self.sides if number % 2 == 0 else reversed(self.sides):
                yield PlannedLaunch(position, side, number)
                position += 1

    def run_folder(self, launch: PlannedLaunch) -> Path:
        """Return where a launch writes: the folder of one run."""
        return self.output / launch.name

    def words_of(self, side: Side) -> list[str]:
        """Return the overrides for train.py, without those that place a launch."""
        return [*self.words, *side.words]

    def command(self, launch: PlannedLaunch) -> list[str]:
        """Return the command line of a launch. The last overrides win, so that no other moves its run folder."""
        side, output = launch.side, self.run_folder(launch)
        values = {
            "{python}": side.python or "",
            "{tree}": side.tree or "",
            "{plan}": str(self.output),
            "{output}": str(output),
            "{side}": side.name,
            "{launch}": f"{launch.number:02d}",
        }
        words: list[str] = []
        for word in side.command or side.launcher or (TORCHRUN,):
            filled = word
            for mark, value in values.items():
                filled = filled.replace(mark, value)
            words += [str(side.python), "-m", "torch.distributed.run"] if word == TORCHRUN else [filled]
        if side.command:
            recorded = any("{output}" in word for word in side.command)
            return words if recorded else [sys.executable, "-m", "aorta", "record", str(output), "--", *words]
        words += ["--standalone", "--nproc_per_node", str(self.nproc_per_node)]
        words += [*training_program(None if side.tree is None else Path(side.tree)), *self.words_of(side)]
        placed = f"training.output_dir={output}"
        if not re.fullmatch(r"[A-Za-z0-9_/.-]+", str(output)):  # quotes only where Hydra's grammar needs them
            from aorta.config.override_words import quoted  # brings Hydra along, for which --help need not wait

            placed = quoted("training.output_dir", str(output))
        return [*words, placed, "label=null"]

    def as_json(self) -> dict[str, Any]:
        """Return what was asked for, as `plan.json` keeps it: two plans are the same if this is equal."""
        return {
            "launches": self.launches,
            "aa": self.aa,
            "nproc_per_node": self.nproc_per_node,
            "words": hide(self.words),
            "timeout_s": self.timeout_s,
            "folder": str(self.folder),
            "sides": {side.name: msgspec.to_builtins(side.without_secrets()) for side in self.sides},
        }


class PlanFile(Side, kw_only=True, forbid_unknown_fields=True):
    """The keys of a plan in YAML. Those of a side are for all sides; `candidate` is what all candidates share;
    `candidates` and `vary` are what `--candidate` and `--vary` give.
    """

    output: str | None = None
    launches: int | None = None
    nproc_per_node: int | None = None
    timeout_s: float | None = None
    aa: bool = False
    reference: Side = msgspec.field(default_factory=Side)
    candidate: Side | None = None
    candidates: list[str | list[str]] = []
    vary: list[str] = []


def read_plan(options: argparse.Namespace, folder: Path) -> Plan:
    """Return the plan that the options ask for, and `--plan FILE` where they say nothing; overrides of both are joined.

    Raises:
        ConfigError: a value is missing, impossible or of another type, or a file is not there.
        InputError: as `side_of` and `grid`; no folder is given; or only some sides have a command.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("a plan starts torchrun itself; start it with python, outside torchrun")
    asked = _merged(_file(options.plan), options)
    if asked.output is None:
        raise InputError("no folder for the plan: give --output DIR, or output: in the plan file")
    for key in ("launches", "nproc_per_node"):
        value = getattr(asked, key)
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value}: must be at least 1")
    if asked.timeout_s is not None and not 0 < asked.timeout_s < math.inf:
        raise ConfigError(f"timeout_s={asked.timeout_s}: must be greater than 0 and finite")
    settings = [side_of(words_in(text, "candidates")) for text in asked.candidates] + grid(asked.vary)
    if len(settings) > MOST_CANDIDATES:
        raise ConfigError(f"{len(settings)} candidates: at most {MOST_CANDIDATES}; give fewer values, or several plans")
    shared = [] if asked.candidate is None else [asked.candidate]
    candidates = [own.over(asked.candidate or Side()) for own in settings] or shared  # what each has of its own
    if asked.aa and candidates:
        raise ConfigError("aa: both sides are the reference; leave out everything about the candidate")
    reference = _side(REFERENCE, asked, asked.reference, folder)
    sides = [reference]
    if asked.aa:
        sides.append(msgspec.structs.replace(reference, name=CANDIDATE))
    for number, own in enumerate(candidates, start=1):
        sides.append(_side(CANDIDATE if len(candidates) == 1 else f"{CANDIDATE}-{number}", asked, own, folder))
    _check_commands(asked, sides)
    return Plan(
        output=_absolute(folder, asked.output),
        folder=folder,
        sides=tuple(sides),
        launches=asked.launches or max(LAUNCHES, launches_needed(len(candidates))),
        words=_for_training(asked.words, "words"),
        nproc_per_node=2 if asked.nproc_per_node is None else asked.nproc_per_node,
        timeout_s=asked.timeout_s,
        aa=asked.aa,
    )


def launches_needed(candidates: int) -> int:
    """Return the fewest launches a side from which so many candidates can have a verdict on step time."""
    from aorta.analysis.compare.rank_tests import least_launches
    from aorta.analysis.compare.verdict import Rules

    return least_launches(Rules().alpha / max(1, candidates))


def side_of(words: Sequence[str]) -> Side:
    """Split words into overrides, `env.NAME=VALUE`, and `python=`, `tree=`, `launcher=` and `command=`.

    Raises:
        InputError: one of these without a value, or a known variable that does not take this value.
    """
    overrides, environment, launch = list[str](), dict[str, str](), dict[str, Any]()
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith(VARIABLE) and name not in LAUNCH_KEYS:
            overrides.append(word)
            continue
        if not equals or not value:
            expected = f"{VARIABLE}NAME" if name.startswith(VARIABLE) else name
            raise InputError(f"{word}: expected {expected}=VALUE")
        if name in LAUNCH_KEYS:
            launch[name] = words_in(value, name) if name in _LISTS else value
        else:
            check_variable(variable := name.removeprefix(VARIABLE), value)
            environment[variable] = value
    return Side(words=tuple(overrides), environment=environment, **launch)


def grid(varied: Sequence[str]) -> list[Side]:
    """Return every combination of the values of `KEY=VALUE,VALUE,...`; the last key varies fastest.

        grid(["env.GPU_MAX_HW_QUEUES=2,4", "parallel.bucket_cap_mb=10,25"])  # four sides

    Args:
        varied: keys of the configuration with values as Hydra sweeps over them, and `env.NAME`.

    Raises:
        InputError: a key with one value or the same value twice, or a value that a variable does not take.
    """
    if not varied:
        return []
    axes: dict[str, list[str]] = {}
    for word in varied:
        name, _, text = word.partition("=")
        key = name.lstrip("+")
        if name.startswith(VARIABLE):
            values = text.split(",")
        else:
            from hydra.core.override_parser.overrides_parser import OverridesParser
            from hydra.errors import HydraException

            try:
                override = OverridesParser.create().parse_override(word)
                several = override.sweep_string_iterator() if override.is_sweep_override() else [text]
                values = [str(value) for value in several]
            except HydraException as error:
                why = str(error).splitlines()[0]
                raise InputError(f"--vary {word}: {why}; give its values one by one") from None
        if len(values) < 2 or len(set(values)) < len(values):
            raise InputError(f"--vary {word}: expected KEY=VALUE,VALUE,... with different values")
        if key in axes:
            raise InputError(f"--vary {word}: {key} is varied twice")
        axes[key] = [f"{key}={value}" for value in values]
    return [side_of(words) for words in product(*axes.values())]


def words_in(value: Any, key: str) -> tuple[str, ...]:
    """Return a list of words as it is; a text taken apart as a shell would.

    Raises:
        ConfigError: something else, or a quote that is not closed.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise ConfigError(f"{key}: {value!r}: {error}") from None
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise ConfigError(f"{key}: {value!r}: must be a text or a list of texts")


def _file(path: str | None) -> PlanFile:
    """Return the YAML file; every key at its default without one."""
    if path is None:
        return PlanFile()
    from omegaconf import DictConfig, OmegaConf

    from aorta.config.override_words import load_yaml

    try:
        loaded = load_yaml(Path(path))
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--plan {path}: {error}") from error
    of_side, keys = ([name for name in node.__struct_fields__ if name != "name"] for node in (Side, PlanFile))
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: must be keys and values: {', '.join(keys)}")
    plain: Any = OmegaConf.to_container(loaded, resolve=False)  # `${...}` in a word is Hydra's
    try:
        for prefix, node in ("", plain), *((f"{side}.", plain.get(side)) for side in SIDES):
            if isinstance(node, dict):
                _as_words_and_texts(node, prefix)
        return msgspec.convert(plain, PlanFile)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}. Keys: {', '.join(keys)}; of a side: {', '.join(of_side)}") from error


def _as_words_and_texts(node: dict[Any, Any], prefix: str) -> None:
    """Take texts among the keys of a side apart, and make texts of numbers in its environment."""
    if "name" in node:
        raise ConfigError(f"{prefix}name: sides have their names from the plan; leave it out")
    for key in _LISTS & node.keys():
        node[key] = words_in(node[key], f"{prefix}{key}")
    environment: Any = node.get("environment")
    for variable, value in list(environment.items()) if isinstance(environment, dict) else ():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ConfigError(f"{prefix}environment.{variable}={value!r}: must be a text; put it in quotes")
        environment[variable] = str(value)


def _merged(asked: PlanFile, options: argparse.Namespace) -> PlanFile:
    """Return the file, with what the command line adds or replaces."""
    for key in ("output", "launches", "nproc_per_node", "timeout_s"):
        value = getattr(options, key)
        if value is not None:
            setattr(asked, key, value)
    asked.aa = asked.aa or options.aa
    of_all = side_of(options.words)
    of_all.command = words_in(options.command, "--command") or of_all.command
    for key, value in msgspec.structs.asdict(of_all.over(asked)).items():
        setattr(asked, key, value)
    own = side_of([word for text in options.reference_words for word in words_in(text, f"--{REFERENCE}")])
    asked.reference = own.over(asked.reference)
    asked.candidates = [*asked.candidates, *options.candidate_words]
    asked.vary = [*asked.vary, *options.vary]
    return asked


def _side(name: str, shared: Side, own: Side, folder: Path) -> Side:
    """Return a side as it is launched, its own over what all share."""
    side, here = own.over(shared), checkout()
    side.name, side.words = name, _for_training(own.words, f"{name}.words")  # the shared ones are the plan's
    side.tree = str(_absolute(folder, side.tree)) if side.tree else None if here is None else str(here)
    program: str | None = sys.executable
    if side.python is not None:  # links are kept, for an environment's interpreter is one
        program = shutil.which(side.python) if os.sep not in side.python else str(_absolute(folder, side.python))
        if program is None or not os.access(program, os.X_OK) or Path(program).is_dir():
            raise ConfigError(
                f"{name}.python={side.python}: no such program; name a Python that has torch and AORTA's dependencies"
            )
    side.python = program if side.names_python else None
    for key, word in [*(("launcher", word) for word in side.launcher), *(("command", word) for word in side.command)]:
        for mark in _PLACEHOLDER.findall(word):
            if mark == "{tree}" and side.tree is None:
                raise ConfigError(f"{name}.{key}: {{tree}}: AORTA runs as a package here; name a checkout (tree=DIR)")
            if mark not in PLACEHOLDERS:
                raise ConfigError(f"{name}.{key}: {mark} is not known; there are {', '.join(PLACEHOLDERS)}")
        if TORCHRUN in word and word != TORCHRUN:
            raise ConfigError(f"{name}.{key}: {word!r}: {TORCHRUN} must be an argument of its own")
    if own.python and side.python is None:
        raise ConfigError(
            f"{name}.python={own.python}: its launcher or command does not use it. Put {TORCHRUN} into it, or leave "
            "python out: a container has an interpreter of its own"
        )
    if side.uses_python and side.tree is not None and not (Path(side.tree) / "train.py").is_file():
        raise ConfigError(f"{name}.tree={side.tree}: no train.py there; name a checkout of AORTA (tree=DIR)")
    return side


def _check_commands(asked: PlanFile, sides: Sequence[Side]) -> None:
    """Refuse what would not reach a command."""
    commands = [side for side in sides if side.command]
    for side in sides:
        if not side.command and commands:
            raise InputError(
                f"{commands[0].name} has a command and {side.name} has none, so {side.name} would be AORTA's own "
                f"train.py; give --command for all sides, or --{side.name.partition('-')[0]} \"command='...'\" too"
            )
    for side in commands:
        if side.launcher:
            raise ConfigError(f"{side.name}: a command is launched as it stands; put the launcher into it")
        if side.words:
            variable = next((word for word in side.words if "." not in word.partition("=")[0]), "NAME=VALUE")
            raise ConfigError(
                f"{side.name}: {shlex.join(side.words)}: overrides are for train.py; put what the program takes "
                f"into its command; for a variable write {VARIABLE}{variable}"
            )
    for key, value in {"overrides": list(asked.words), "nproc_per_node": asked.nproc_per_node}.items():
        if commands and value not in (None, []):
            raise ConfigError(
                f"{key}={value}: does not reach the command of the {commands[0].name}, which is launched as it stands; "
                "put it into the command"
            )


def _absolute(folder: Path, word: str) -> Path:
    return Path(os.path.normpath(folder / Path(word).expanduser()))


def _for_training(words: tuple[str, ...], key: str) -> tuple[str, ...]:
    for word in words:
        name = word.partition("=")[0]
        if name in _NOT_WORDS:
            raise ConfigError(f"{key}: {word}: a launch of a plan is one training, no sweep and no listing")
        if name.lstrip("+~") in _PLACED:
            raise ConfigError(f"{key}: {word}: the plan places its launches itself; leave {name.lstrip('+~')} out")
    return words
