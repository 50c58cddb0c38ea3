"""Generates mutants of a Python module: each is one small change that a test should notice.

    for mutant in mutants("aorta.timeline.intervals"):
        print(mutant.diff())

The operators are those of the literature: statements dropped, conditions negated, comparisons and operators swapped,
numbers one more or less, keyword arguments dropped, None returned. What nobody computes with is left alone:
annotations, decorators, docstrings, the text of messages. A change is a place in the source and its new text, so that
everything else stays as it is formatted. Must not: write a file, import what it changes.

Sources: DeMillo, Lipton and Sayward, "Hints on test data selection", Computer 11(4), 1978; Jia and Harman, "An analysis
and survey of the development of mutation testing", IEEE TSE 37(5), 2011.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
}
OPPOSITES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
"""Functions that are exchanged for each other."""
SKIPPED_FIELDS: Final = frozenset({"annotation", "returns", "decorator_list", "type_params", "type_comment", "exc"})
"""Parts of nodes that no value depends on, or that are the words of a message."""


@dataclass(frozen=True)
class Mutant:
    """The bytes from `start` to `end` of a module's source become `new`."""

    module: str
    file: str
    operator: str
    line: int
    start: int
    end: int
    new: str

    @property
    def name(self) -> str:
        """What is printed of it, and what `--only` is matched with."""
        return f"{self.file}:{self.line}: {self.operator}"

    def source(self) -> str:
        """The module's source with the change."""
        text = (ROOT / self.file).read_bytes()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()

    def changes_something(self) -> bool:
        """Whether the result is Python, and another program than the module."""
        try:
            mutated = ast.parse(self.source())
        except SyntaxError:
            return False
        return ast.dump(mutated) != ast.dump(ast.parse((ROOT / self.file).read_bytes()))

    def diff(self) -> str:
        """The change as a unified diff."""
        sides = [text.splitlines() for text in ((ROOT / self.file).read_text(), self.source())]
        return "\n".join(difflib.unified_diff(*sides, self.file, self.file, n=1, lineterm=""))


def mutants(module: str) -> list[Mutant]:
    """The mutants of a module, in the order of its source; ask each whether it `changes_something`."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return list(_Finder(module, path).of(ast.parse(path.read_bytes())))


class _Finder:
    """Finds the mutants of one file."""

    def __init__(self, module: str, path: Path) -> None:
        self._module, self._file, self._text = module, str(path.relative_to(ROOT)), path.read_bytes()
        self._lines = [0]
        for line in self._text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def of(self, node: ast.AST) -> Iterator[Mutant]:
        """Those of a node and of all that it holds."""
        if isinstance(node, ast.JoinedStr):  # mostly a message; and its parts have no positions before Python 3.12
            return
        for operator, (start, end), new in self._changes(node):
            line = self._text.count(b"\n", 0, start) + 1
            yield Mutant(self._module, self._file, operator, line, start, end, new)
        for field, value in ast.iter_fields(node):
            if field not in SKIPPED_FIELDS:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self.of(child)

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, tuple[int, int], str]]:
        """The operator, the place and the new text of each change of this node itself."""
        match node:
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
                yield "drop a statement", self._span(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Continue() | ast.Break():
                yield "drop a statement", self._span(node), "pass"
            case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
                yield "return None", self._span(value), "None"
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield "negate a condition", self._span(test), f"(not ({self._source(test)}))"
            case ast.comprehension(ifs=tests):
                for test in tests:
                    yield "drop a filter", self._span(test), "True"
            case ast.Compare(left=left, ops=ops, comparators=others):
                for before, kind, after in zip([left, *others], ops, others, strict=False):
                    old, new = COMPARISONS[type(kind)]
                    yield from self._between(f"{old} becomes {new}", before, after, old, new)
            case ast.BoolOp(values=operands):
                yield from self._boolean(node, operands)
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in ARITHMETIC:
                old, new = ARITHMETIC[type(kind)]
                yield from self._between(f"{old} becomes {new}", left, right, old, new)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                yield "drop a sign", self._span(node), f"({self._source(operand)})"
            case ast.Constant(value=bool() as value):
                yield f"{value} becomes {not value}", self._span(node), str(not value)
            case ast.Constant(value=int() | float() as value):
                yield "one more", self._span(node), f"({value + 1!r})"
                yield "one less", self._span(node), f"({value - 1!r})"
            case ast.Call():
                yield from self._call(node)

    def _boolean(self, node: ast.BoolOp, operands: Sequence[ast.expr]) -> Iterator[tuple[str, tuple[int, int], str]]:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        sources = [f"({self._source(operand)})" for operand in operands]
        yield f"{old} becomes {new}", self._span(node), f"({f' {new} '.join(sources)})"
        for number in range(len(sources)):
            left = sources[:number] + sources[number + 1 :]
            yield f"drop an operand of {old}", self._span(node), f"({f' {old} '.join(left)})"

    def _call(self, node: ast.Call) -> Iterator[tuple[str, tuple[int, int], str]]:
        if isinstance(node.func, ast.Name) and node.func.id in OPPOSITES:
            new = OPPOSITES[node.func.id]
            yield f"{node.func.id} becomes {new}", self._span(node.func), new
        given = sorted((self._span(argument) for argument in (*node.args, *node.keywords)), key=lambda span: span[0])
        for keyword in node.keywords:
            if keyword.arg is not None:
                start, end = self._span(keyword)
                place = given.index((start, end))
                if place + 1 < len(given):
                    end = given[place + 1][0]
                elif place:
                    start = given[place - 1][1]
                else:
                    end = self._span(node)[1] - 1
                yield f"drop the argument {keyword.arg}", (start, end), ""

    def _between(
        self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Iterator[tuple[str, tuple[int, int], str]]:
        """Exchange the operator that stands between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._text[start:end].decode()
        if between.count(old) == 1:
            yield operator, (start, end), between.replace(old, new)

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Where a node stands, in bytes."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def _source(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._text[start:end].decode()
