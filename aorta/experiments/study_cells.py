"""The cells of a study: every combination of the values that its words give to keys and environment variables.

    read_words(["env.GPU_MAX_HW_QUEUES=2,4", "parallel.bucket_cap_mb=10,25", "training.max_steps=40"])

gives four cells; `training.max_steps=40` belongs to all of them and to the base. Must not launch anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from aorta.errors import InputError, meant
from aorta.records.environment_variables import check_variable, shown_values, shown_variables

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
    """One combination. `overrides` are words for train.py, `environment` variables of its launches."""

    values: Mapping[str, str]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its words for train.py."""
        return tuple(f"{key}={value}" for key, value in self.values.items() if not key.startswith(VARIABLE))

    @property
    def environment(self) -> dict[str, str]:
        """Its variables."""
        named = {key: value for key, value in self.values.items() if key.startswith(VARIABLE)}
        return {key.removeprefix(VARIABLE): value for key, value in named.items()}

    def as_json(self) -> dict[str, Any]:
        """Its words and variables, as far as they may be shown."""
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
class StudyWords:
    """What is studied.

    Attributes:
        varied: key -> the values of its cells, in the order given.
        words: for train.py in every launch.
        environment: variables of every launch.
        notes: about variables that are not known.
    """

    varied: Mapping[str, tuple[str, ...]]
    words: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]

    def cells(self) -> list[StudyCell]:
        """Every combination; the last key varies fastest."""
        return [StudyCell(dict(zip(self.varied, values, strict=True))) for values in product(*self.varied.values())]


def preset(name: str | None) -> tuple[str, ...]:
    """The words of a preset; none without a name.

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


def read_words(words: Sequence[str]) -> StudyWords:
    """Tell the words that vary from those for all launches. A later word replaces an earlier one of its key.

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
    return StudyWords(
        varied,
        tuple(word for key, word in fixed.items() if not key.startswith(VARIABLE)),
        {key.removeprefix(VARIABLE): given[key][1][0] for key in fixed if key.startswith(VARIABLE)},
        tuple(dict.fromkeys(note for note in notes if note is not None)),
    )


def _values(word: str) -> tuple[str, ...]:
    """The values of a word, as they were written; one where it varies nothing."""
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
