"""What a plan is: its sides, how often each is launched, in which order, and the command line of each launch.

`plan_options` makes one from what a user gave; `launch_engine` carries it out. The candidates of a study are cells:
every combination of the values that its words give to keys and environment variables.

    read_words(["env.GPU_MAX_HW_QUEUES=2,4", "parallel.bucket_cap_mb=10,25", "training.max_steps=40"])

gives four cells; `training.max_steps=40` belongs to all of them and to the base. Must not touch the disk, or start
anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol

from aorta.analysis.documents.comparison import SIDES
from aorta.errors import ConfigError, InputError, meant
from aorta.installation import training_program
from aorta.records.environment_variables import check_variable, hide, shown_values, shown_variables

REFERENCE, CANDIDATE = SIDES
TORCHRUN: Final = "{torchrun}"
"""Word of a launcher that stands for the side's interpreter and `-m torch.distributed.run`."""
PLACEHOLDERS: Final = ("{torchrun}", "{python}", "{tree}", "{plan}", "{output}", "{side}", "{launch}")
"""What words of a launcher or a command may hold: the side's torchrun, its interpreter, its checkout, the plan folder,
the run folder of the launch, the side's name, the number of the launch.
"""


@dataclass(frozen=True)
class Side:
    """One of the stacks that are compared.

    Attributes:
        name: `reference` or `candidate`; of several candidates `candidate-1`, ... It names a folder.
        words: overrides for train.py, after those that both sides share.
        python: the interpreter.
        launcher: words that launch in place of the interpreter's torchrun; none: the interpreter's torchrun.
        environment: variables added to the caller's.
        tree: the checkout whose train.py runs; None: the package that the interpreter has installed.
        command: the whole command line of a program that records itself; nothing is added to it. None: train.py runs.
    """

    name: str
    words: tuple[str, ...]
    python: str
    launcher: tuple[str, ...]
    environment: Mapping[str, str]
    tree: str | None
    command: tuple[str, ...] | None = None

    @property
    def uses_python(self) -> bool:
        """Whether the interpreter named here launches train.py; a container has its own."""
        if self.command is not None:
            return False
        return not self.launcher or any(mark in word for word in self.launcher for mark in (TORCHRUN, "{python}"))

    def as_json(self) -> dict[str, Any]:
        """Return what was asked for; values whose names look like secrets are hidden."""
        return {
            "words": hide(self.words),
            "python": self.python if self.uses_python else None,
            "launcher": hide(self.launcher),
            "environment": shown_values(dict(sorted(self.environment.items()))),
            "tree": self.tree,
            **({} if self.command is None else {"command": hide(self.command)}),
        }


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch of a plan: its place in the order of all, its side, and its number on that side; both from 0."""

    order: int
    side: Side
    number: int

    @property
    def name(self) -> str:
        """The folder of its run inside the plan folder: `candidate/03`."""
        return f"{self.side.name}/{self.number:02d}"


@dataclass(frozen=True)
class Plan:
    """Everything that is launched.

    Attributes:
        output: the plan folder, absolute.
        folder: where the launches run, absolute; relative words are seen from it.
        launches: of each side.
        words: overrides for train.py in every launch, before the side's.
        torchrun: more words for torchrun.
        seed: `training.seed` of every launch.
        timeout_s: a launch that lasts longer is ended, and failed.
        aa: both sides are the reference.
    """

    output: Path
    folder: Path
    sides: tuple[Side, ...]
    launches: int
    words: tuple[str, ...] = ()
    nproc_per_node: int = 2
    torchrun: tuple[str, ...] = ()
    seed: int | None = None
    timeout_s: float | None = None
    aa: bool = False

    def order(self) -> Iterator[PlannedLaunch]:
        """Yield the launches in the order A B B A A B B A ...: a drift of the machine that is linear in time falls on
        both sides alike (docs/dev/measuring.md, section 5). One side: one launch after the other.
        """
        place = 0
        for number in range(self.launches):
            for side in self.sides if number % 2 == 0 else reversed(self.sides):
                yield PlannedLaunch(place, side, number)
                place += 1

    def run_folder(self, launch: PlannedLaunch) -> Path:
        """Return where a launch writes: the folder of one run."""
        return self.output / launch.name

    def words_of(self, side: Side) -> list[str]:
        """Return the overrides for train.py, without those that place a launch."""
        seed = [] if self.seed is None else [f"training.seed={self.seed}"]
        return [*self.words, *side.words, *seed]

    def command(self, launch: PlannedLaunch) -> list[str]:
        """Return the command line of a launch. The last overrides win, so that no other moves its run folder."""
        side, output = launch.side, self.run_folder(launch)
        values = {
            "{python}": side.python,
            "{tree}": side.tree or "",
            "{plan}": str(self.output),
            "{output}": str(output),
            "{side}": side.name,
            "{launch}": f"{launch.number:02d}",
        }
        words: list[str] = []
        for word in side.command or side.launcher or (TORCHRUN,):
            words += [side.python, "-m", "torch.distributed.run"] if word == TORCHRUN else [_filled(word, values)]
        if side.command is not None:
            return words
        words += ["--standalone", "--nproc_per_node", str(self.nproc_per_node), *self.torchrun]
        words += [*training_program(None if side.tree is None else Path(side.tree)), *self.words_of(side)]
        return [*words, _output_word(output), "label=null"]

    def as_json(self) -> dict[str, Any]:
        """Return what was asked for, as `plan.json` keeps it: two plans are the same if this is equal."""
        return {
            "launches": self.launches,
            "aa": self.aa,
            "nproc_per_node": self.nproc_per_node,
            "torchrun": hide(self.torchrun),
            "words": hide(self.words),
            "seed": self.seed,
            "timeout_s": self.timeout_s,
            "folder": str(self.folder),
            "sides": {side.name: side.as_json() for side in self.sides},
        }


class Setting(Protocol):
    """What a candidate changes in the base: overrides for train.py, and variables."""

    @property
    def overrides(self) -> tuple[str, ...]: ...

    @property
    def environment(self) -> Mapping[str, str]: ...


def with_candidates(base: Plan, output: Path, settings: Sequence[Setting]) -> Plan:
    """Return a plan of the base alone and a candidate for each setting, in turn: `reference`, `candidate-1`, ...

    Raises:
        ConfigError: a setting has overrides, and the base is no train.py.
    """
    (reference,) = base.sides
    overrides = [word for one in settings for word in one.overrides]
    if reference.command is not None and overrides:
        raise ConfigError(
            f"{overrides[0]}: overrides are for train.py, and these launches are of a command; only variables can vary "
            "(env.NAME=VALUE,VALUE)"
        )
    sides = [
        replace(
            reference,
            name=f"{CANDIDATE}-{number}",
            words=(*reference.words, *one.overrides),
            environment={**reference.environment, **one.environment},
        )
        for number, one in enumerate(settings, start=1)
    ]
    return replace(base, output=output, sides=(reference, *sides))


def _output_word(folder: Path) -> str:
    """Return the word that says where a run writes; in quotes only where Hydra's grammar needs them."""
    if re.fullmatch(r"[A-Za-z0-9_/.-]+", str(folder)):
        return f"training.output_dir={folder}"
    from aorta.config.override_words import quoted  # brings Hydra along, for which --help need not wait

    return quoted("training.output_dir", str(folder))


def _filled(word: str, values: Mapping[str, str]) -> str:
    for mark, value in values.items():
        word = word.replace(mark, value)
    return word


VARIABLE: Final = "env."
"""What a key begins with that names an environment variable."""
MOST_CELLS: Final = 64
PRESETS: Final[Mapping[str, tuple[str, ...]]] = {
    "channels-threads": ("env.NCCL_MAX_NCHANNELS=4,8,16", "env.NCCL_NTHREADS=128,256,512"),
    "queues-rocm": ("env.GPU_MAX_HW_QUEUES=2,4,8",),
    "queues-cuda": ("env.CUDA_DEVICE_MAX_CONNECTIONS=1,8,32",),
    "buckets": ("parallel=ddp", "parallel.bucket_cap_mb=1,5,10,25,50", "parallel.overlap=true,false"),
    "prefetch": ("parallel=fsdp", "parallel.forward_prefetch=0,1,2", "parallel.backward_prefetch=0,1,2"),
}
"""Words by name. No strategy has both buckets (DDP's) and prefetching (FSDP's), so those are two."""


@dataclass(frozen=True)
class StudyCell:
    """One combination. `overrides` are for train.py, `environment` are variables of its launches."""

    values: Mapping[str, str]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its overrides for train.py."""
        return tuple(f"{key}={value}" for key, value in self.values.items() if not key.startswith(VARIABLE))

    @property
    def environment(self) -> dict[str, str]:
        """Its variables."""
        named = {key: value for key, value in self.values.items() if key.startswith(VARIABLE)}
        return {key.removeprefix(VARIABLE): value for key, value in named.items()}

    def as_json(self) -> dict[str, Any]:
        """Return its overrides and variables, secrets hidden."""
        return {"overrides": list(self.overrides), "environment": shown_values(self.environment)}

    @property
    def shown(self) -> dict[str, str]:
        """Its values as they may be shown."""
        return shown_values(self.values)

    @property
    def name(self) -> str:
        """What it is, in the words a person copies."""
        return " ".join([*shown_variables(self.environment), *self.overrides])


@dataclass(frozen=True)
class StudyDefinition:
    """What is studied.

    Attributes:
        varied: key -> the values of its cells, in the order given.
        words: overrides for train.py in every launch.
        environment: variables of every launch.
        notes: about variables that are not known.
    """

    varied: Mapping[str, tuple[str, ...]]
    words: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]

    def cells(self) -> list[StudyCell]:
        """Return every combination; the last key varies fastest."""
        return [StudyCell(dict(zip(self.varied, values, strict=True))) for values in product(*self.varied.values())]


def preset(name: str | None) -> tuple[str, ...]:
    """Return the overrides of a preset; none without a name.

    Raises:
        InputError: lists those there are.
    """
    if name is None:
        return ()
    if name not in PRESETS:
        known = "; ".join(f"{each}: {' '.join(words)}" for each, words in PRESETS.items())
        raise InputError(
            f"--preset {name}: there is no such preset; {meant(name, PRESETS, after=' ')}there are {known}"
        )
    return PRESETS[name]


def read_words(words: Sequence[str]) -> StudyDefinition:
    """Split overrides into those that vary and those for all launches; a later one replaces an earlier of its key.

    Raises:
        InputError: nothing varies, a value is given twice or refused, or there are more than `MOST_CELLS` cells.
    """
    given: dict[str, tuple[str, tuple[str, ...]]] = {}
    for word in words:
        key, equals, _ = word.partition("=")
        key = key.lstrip("+")
        if key.startswith(VARIABLE) and not equals:
            raise InputError(f"{word}: expected {VARIABLE}NAME=VALUE or {VARIABLE}NAME=VALUE,VALUE,...")
        given[key] = (word, _values(word))
    varied = {key: values for key, (_, values) in given.items() if len(values) > 1}
    if not varied:
        raise InputError(
            "nothing is varied: give a key or a variable several values, as parallel.bucket_cap_mb=10,25 or "
            f"{VARIABLE}OMP_NUM_THREADS=1,2, or a --preset ({', '.join(PRESETS)})"
        )
    for key, values in varied.items():
        if len(set(values)) < len(values):
            raise InputError(f"{key}={','.join(values)}: a value is given twice")
        _refuse_other_work(key, values)
    count = 1
    for values in varied.values():
        count *= len(values)
    if count > MOST_CELLS:
        raise InputError(f"{count} cells: at most {MOST_CELLS} in a study; give fewer values, or several studies")
    notes = [
        check_variable(key.removeprefix(VARIABLE), value)
        for key, (_, values) in given.items()
        if key.startswith(VARIABLE)
        for value in values
    ]
    fixed = {key: word for key, (word, values) in given.items() if key not in varied}
    return StudyDefinition(
        varied,
        tuple(word for key, word in fixed.items() if not key.startswith(VARIABLE)),
        {key.removeprefix(VARIABLE): given[key][1][0] for key in fixed if key.startswith(VARIABLE)},
        tuple(dict.fromkeys(note for note in notes if note is not None)),
    )


def _values(word: str) -> tuple[str, ...]:
    """Return the values of a word, as they were written; one where it varies nothing."""
    key, _, text = word.lstrip("+").partition("=")
    if key.startswith(VARIABLE):
        values = tuple(text.split(","))
        if not all(values):
            raise InputError(f"{word}: a value is empty")
        return values
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(word)
        if not override.is_sweep_override():
            return (text,)
        return tuple(str(value) for value in override.sweep_string_iterator())
    except HydraException as error:
        raise InputError(f"{word}: {str(error).splitlines()[0]}; give its values one by one") from None


def _refuse_other_work(key: str, values: Sequence[str]) -> None:
    """Raises:
    InputError: cells would do other work than the base, so that no step time of theirs could be held to its.
    """
    from aorta.analysis.compare.run_comparison import changes_the_work
    from aorta.analysis.documents.comparison import FactDifference

    if not key.startswith(VARIABLE) and changes_the_work(FactDifference(f"config.{key}", None, values[0])):
        raise InputError(
            f"{key}={','.join(values)}: its cells would do other work than the base, and step times of different work "
            f"are not compared; look at them with a sweep: aorta train -m {key}={','.join(values)}"
        )
