"""Generates mutants of a Python module: each is one small change that a test should notice.

    for mutant in mutants("aorta.timeline.intervals"):
        print(mutant.diff())

The operators are those of the literature: statements dropped, conditions negated, comparisons and operators swapped,
numbers one more or less, keyword arguments dropped, None returned. What nobody computes with is left alone:
annotations, decorators, docstrings, the text of messages. A mutant is the module's syntax tree with one node exchanged,
written as Python again. Must not: write a file, import what it changes.

Sources: DeMillo, Lipton and Sayward, "Hints on test data selection", Computer 11(4), 1978; Jia and Harman, "An analysis
and survey of the development of mutation testing", IEEE TSE 37(5), 2011.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
}
OPPOSITES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
"""Functions that are exchanged for each other."""
SKIPPED_FIELDS: Final = frozenset({"annotation", "returns", "decorator_list", "type_params", "type_comment", "exc"})
"""Parts of nodes that no value depends on, or that are the words of a message."""


@dataclass(frozen=True)
class Mutant:
    """The change of this `number`, in the order of the source."""

    module: str
    file: str
    operator: str
    line: int
    number: int

    @property
    def name(self) -> str:
        """What is printed of it, and what `--only` is matched with."""
        return f"{self.file}:{self.line}: {self.operator}"

    def source(self) -> str:
        """The module's source with the change, formatted as `ast.unparse` does."""
        tree = ast.parse((ROOT / self.file).read_bytes())
        holder, field, place, _, new = list(_changes(tree))[self.number]
        if place is None:
            setattr(holder, field, new)
        else:
            getattr(holder, field)[place] = new
        return ast.unparse(tree)

    def diff(self) -> str:
        """The change as a unified diff."""
        before = ast.unparse(ast.parse((ROOT / self.file).read_bytes()))
        sides = before.splitlines(), self.source().splitlines()
        return "\n".join(difflib.unified_diff(*sides, self.file, self.file, n=1, lineterm=""))


def mutants(module: str) -> list[Mutant]:
    """The mutants of a module, in the order of its source."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    file = str(path.relative_to(ROOT))
    found = []
    for number, (holder, field, place, operator, _) in enumerate(_changes(ast.parse(path.read_bytes()))):
        old = getattr(holder, field)
        line = (old if place is None else old[place]).lineno
        found.append(Mutant(module, file, operator, line, number))
    return found


def _changes(holder: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, str, ast.AST]]:
    """For each change below a node: who holds what is exchanged, its field and place there, the operator, the new."""
    if isinstance(holder, ast.JoinedStr):  # mostly a message
        return
    for field, value in ast.iter_fields(holder):
        if field in SKIPPED_FIELDS:
            continue
        children = enumerate(value) if isinstance(value, list) else [(None, value)]
        for place, child in children:
            if isinstance(child, ast.AST):
                if field == "ifs":
                    yield holder, field, place, "drop a filter", ast.Constant(value=True)
                elif field == "test":
                    yield holder, field, place, "negate a condition", ast.UnaryOp(op=ast.Not(), operand=child)
                for operator, new in _exchanges(child):
                    yield holder, field, place, operator, new
                yield from _changes(child)


def _exchanges(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What one node is exchanged for, with the name of the operator."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield "drop a statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Continue() | ast.Break():
            yield "drop a statement", ast.Pass()
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None", _with(node, value=ast.Constant(value=None))
        case ast.Compare(ops=ops):
            for number, kind in enumerate(ops):
                new = COMPARISONS[type(kind)]
                yield (
                    f"{_word(kind)} becomes {_word(new)}",
                    _with(node, ops=[*ops[:number], new(), *ops[number + 1 :]]),
                )
        case ast.BoolOp(op=kind, values=operands):
            other = ast.Or if isinstance(kind, ast.And) else ast.And
            yield f"{_word(kind)} becomes {_word(other)}", _with(node, op=other())
            for number in range(len(operands)):
                yield (
                    f"drop an operand of {_word(kind)}",
                    _with(node, values=operands[:number] + operands[number + 1 :]),
                )
        case ast.BinOp(op=kind) if type(kind) in ARITHMETIC:
            opposite = ARITHMETIC[type(kind)]
            yield f"{_word(kind)} becomes {_word(opposite)}", _with(node, op=opposite())
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "drop a sign", operand
        case ast.Constant(value=bool() as value):
            yield f"{value} becomes {not value}", ast.Constant(value=not value)
        case ast.Constant(value=int() | float() as value):
            yield "one more", ast.Constant(value=value + 1)
            yield "one less", ast.Constant(value=value - 1)
        case ast.Call(func=function, keywords=keywords):
            if isinstance(function, ast.Name) and function.id in OPPOSITES:
                opposite_name = OPPOSITES[function.id]
                yield f"{function.id} becomes {opposite_name}", _with(node, func=_with(function, id=opposite_name))
            for keyword in keywords:
                if keyword.arg is not None:
                    left = [other_one for other_one in keywords if other_one is not keyword]
                    yield f"drop the argument {keyword.arg}", _with(node, keywords=left)


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    """A copy of a node with other fields."""
    changed = copy(node)
    vars(changed).update(fields)
    return changed


def _word(operator: ast.AST | type[ast.AST]) -> str:
    """An operator as it is written in Python."""
    kind = operator if isinstance(operator, type) else type(operator)
    a, b = ast.Name("a"), ast.Name("b")
    if issubclass(kind, ast.cmpop):
        return ast.unparse(ast.Compare(a, [kind()], [b]))[2:-2]
    return ast.unparse(ast.BoolOp(kind(), [a, b]) if issubclass(kind, ast.boolop) else ast.BinOp(a, kind(), b))[2:-2]
