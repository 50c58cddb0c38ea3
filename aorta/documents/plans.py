"""A side of an A/B: what a user gives, what a plan launches, what `plan.json` keeps and reports name."""

from __future__ import annotations

import shlex
from itertools import takewhile

import msgspec

from aorta.redaction import hide, shown_values, shown_variables

TORCHRUN = "{torchrun}"
"""Word of a launcher that stands for the side's interpreter and `-m torch.distributed.run`."""


class Side(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the stacks that are compared.

    Attributes:
        name: `reference` or `candidate`; of several candidates `candidate-1`, ... It names a folder.
        words: overrides for train.py, after those that all sides share.
        command: the whole command line of another program, which records into `{output}` where it names that, and is
            otherwise recorded by `aorta record`. Empty: train.py runs.
        python: the interpreter; None where no launch of the side needs it, as a container has its own.
        launcher: words that launch in place of the interpreter's torchrun. Empty: the interpreter's torchrun.
        environment: variables added to the caller's.
        tree: the checkout whose train.py runs; None: the package that the interpreter has installed.
    """

    name: str = ""
    words: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    python: str | None = None
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    tree: str | None = None

    @property
    def uses_python(self) -> bool:
        """Whether the interpreter named here launches train.py."""
        return not self.command and self.names_python

    @property
    def names_python(self) -> bool:
        """Whether the interpreter named here is part of a launch."""
        words = self.command or self.launcher or (TORCHRUN,)
        return any(mark in word for word in words for mark in (TORCHRUN, "{python}"))

    def over(self, shared: Side) -> Side:
        """Return this side with what `shared` has and this one leaves open. Words and variables are joined, and this
        side's come last; the rest is replaced.
        """
        return Side(
            name=self.name,
            words=(*shared.words, *self.words),
            command=self.command or shared.command,
            python=self.python or shared.python,
            launcher=self.launcher or shared.launcher,
            environment={**shared.environment, **self.environment},
            tree=self.tree or shared.tree,
        )

    def without_secrets(self) -> Side:
        return msgspec.structs.replace(
            self,
            words=tuple(hide(self.words)),
            command=tuple(hide(self.command)),
            launcher=tuple(hide(self.launcher)),
            environment=shown_values(dict(sorted(self.environment.items()))),
        )

    def settings(self, shared: Side | None = None) -> str:
        """Return the variables and overrides that it sets, as a person copies them, without secrets: `CAP=8 a=1`.
        Variables that `shared` sets alike are left out. Beside `shared` stands its command, too, or in what it differs.
        """
        base = {} if shared is None else shared.environment
        own = {name: value for name, value in self.environment.items() if base.get(name) != value}
        command = [] if shared is None else hide(_differing(list(self.command), list(shared.command)))
        return " ".join([*shown_variables(own), *([shlex.join(command)] if command else []), *hide(self.words)])


def _differing(command: list[str], other: list[str]) -> list[str]:
    """Return the words of a command without those that another one begins and ends with; an option keeps its value."""
    if command == other:
        return []

    def alike(own: list[str], others: list[str]) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, others, strict=False)))

    first = alike(command, other)
    last = alike(command[first:][::-1], other[first:][::-1])
    if first and command[first - 1].startswith("-") and "=" not in command[first - 1]:
        first -= 1
    return command[first : len(command) - last] or command
