"""What every change of a what-if is: how it is written, what it does to a program, in which turn, and its stated error.

`network_changes`, `rank_changes` and `strategy_changes` define one class for each; `changes` knows them all. Must not
replay, or predict anything.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from aorta.analysis.whatif.program import RunProgram
from aorta.errors import InputError

FACTOR_LIMIT: Final = 1e6
"""A factor is at most this, and at least its inverse: beyond it 64 bits of nanoseconds could overflow."""
_FACTOR: Final = re.compile(r"x([0-9.eE+-]+)")


@dataclass(frozen=True)
class Changed:
    """A program with changes made, and sentences about what was assumed for them."""

    program: RunProgram
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change(ABC):
    """One change, as a value. `text` is how it was written.

    Attributes:
        HEAD: the first word of its target.
        FORMS: what can be set -> how it is written, an example each.
        TURN: changes are made in the order of this number, whatever the order in which they are given; several of one
            class in the order given.
        STATED_ERROR: the part of the predicted change that may be wrong: assumed, then measured
        (docs/dev/what-if-model.md).
    """

    HEAD: ClassVar[str]
    FORMS: ClassVar[Mapping[str, str]]
    TURN: ClassVar[int]
    STATED_ERROR: ClassVar[float] = 0.10

    text: str

    @classmethod
    @abstractmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read `HEAD.rest=value`; `text` is all of it.

        Raises:
            InputError: it is not understood; the message says what is allowed.
        """

    @abstractmethod
    def make(self, program: RunProgram) -> Changed:
        """Give the program with the change made; the one it was given stays as it is.

        Raises:
            InputError: it cannot be made in this program; the message says why.
        """

    @classmethod
    def refused(cls, text: str, why: str, *forms: str) -> InputError:
        """The error for what cannot be read: why, and how `forms` are written; without any, nothing more."""
        return refused(text, why, *(cls.FORMS[form] for form in forms))


def refused(text: str, why: str, *allowed: str) -> InputError:
    """The error for a change that cannot be read."""
    return InputError(f"--set {text}: {why}" + (f". Allowed: {'; '.join(allowed)}" if allowed else ""))


def is_count(text: str) -> bool:
    """Whether a text is a plain number from 0; of `str.isdigit`, also what `int` refuses is."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def factor_of(change: type[Change], text: str, value: str, form: str, allowed: str = "a factor such as x2") -> float:
    """Read a factor, written as x2.

    Raises:
        InputError: it is none, or beyond `FACTOR_LIMIT`.
    """
    match = _FACTOR.fullmatch(value)
    if match is None:
        raise change.refused(text, f"{value!r} is not {allowed}", form)
    factor = number_of(change, text, match[1], "a factor such as x2", form)
    if factor <= 0:
        raise change.refused(text, f"a factor is greater than 0, not {factor:g}", form)
    if not 1 / FACTOR_LIMIT <= factor <= FACTOR_LIMIT:
        between = f"{1 / FACTOR_LIMIT:g} and {FACTOR_LIMIT:g}"
        raise change.refused(text, f"a factor is between {between}, not {factor:g}", form)
    return factor


def number_of(change: type[Change], text: str, value: str, allowed: str, *forms: str) -> float:
    """Read a number.

    Args:
        allowed: what would be read, in words; `forms`: targets whose examples the error shows.

    Raises:
        InputError: it is none, or larger than anything that a machine has.
    """
    try:
        number = float(value)
    except ValueError:
        raise change.refused(text, f"{value!r} is not {allowed}", *forms) from None
    if not math.isfinite(number) or abs(number) > 1e12:
        raise change.refused(text, f"{value} is beyond any machine", *forms)
    return number
