"""Which changes of the code the tests notice: `python -m benchmarks.code_mutants [MODULE ...]`.

Changes a module in one place (a comparison, `and` and `or`, a sign, a number, a condition, a returned value, a
statement taken out), for a sample of all such places, and runs the tests that state its rules, until the first that
fails. Every mutant is a process forked from one that has loaded the libraries; the changed module exists in its memory
only, so tests that start processes of their own do not see it. Strings and annotations are left as they are.

Prints one JSON object last: mutants and killed of each module, and the places of those that survived; exit 1 where a
module's tests fail without a change.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

TESTS: Final = {
    "aorta.timeline.overlap": ["tests/timeline/test_overlap.py", "tests/timeline/test_arrays.py"],
    "aorta.read.exposed": ["tests/read/test_exposed.py"],
    "aorta.read.matching": ["tests/analysis/test_collective_metrics.py"],
    "aorta.analysis.compare.verdict": [
        "tests/analysis/compare/test_verdict.py",
        "tests/analysis/test_headline.py",
    ],
    "aorta.autopsy.disagreement": ["tests/autopsy/test_rules.py", "tests/autopsy/test_flight_recorder.py"],
    "aorta.autopsy.rules": ["tests/autopsy/test_rules.py", "tests/autopsy/test_flight_recorder.py"],
    "aorta.instrument.dispatcher": ["tests/instrument/test_dispatcher.py"],
}
"""Modules that measure, find or judge, and the tests that state their rules."""
LIBRARIES: Final = ("hypothesis.strategies", "msgspec", "numpy", "pytest", "scipy.stats", "torch.distributed")
"""Loaded once, before the processes of the mutants are forked."""
LOADED: Final = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""pytest says of libraries with plugins that it did not load them."""
NO_DIFFERENCE: Final = 0
HANGS_S: Final = 300.0
"""A mutant whose tests take longer never ends, and is killed by that: without a change they take 2 to 20 s."""

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def changes(node: ast.AST) -> list[str]:
    """Ways to change a node; `change` makes them."""
    match node:
        case ast.Compare():
            return ["comparison"]
        case ast.BoolOp():
            return ["and, or"]
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _OPERATORS:
            return ["operator"] if isinstance(node, ast.BinOp) else ["operator", "no statement"]
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return ["sign"]
        case ast.Constant(value=bool() | int() | float()):
            return ["number"]
        case ast.If() | ast.IfExp() | ast.While():
            return ["condition"]
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            return ["returned"]
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
            return ["no statement"]
    return []


def change(node: ast.AST, way: str) -> ast.AST:
    """The node that takes the place of `node`; may change `node` itself."""
    match node, way:
        case ast.stmt(), "no statement":
            return ast.copy_location(ast.Pass(), node)
        case ast.Compare(), _:
            node.ops[0] = _COMPARISONS[type(node.ops[0])]()
        case ast.BoolOp(), _:
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ((ast.BinOp() | ast.AugAssign()), _):
            node.op = _OPERATORS[type(node.op)]()
        case ast.UnaryOp(), _:
            return node.operand
        case ast.Constant(value=bool() as value), _:
            node.value = not value
        case ast.Constant(value=int() | float() as value), _:
            node.value = value + 1
        case ((ast.If() | ast.IfExp() | ast.While()), _):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        case ast.Return(), _:
            node.value = ast.copy_location(ast.Constant(None), node)
    return node


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield parent, field, index in the field and node of everything but annotations, in the order of the text."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield tree, name, index, child
                yield from places(child)


def mutants(source: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the place and the tree of each change of a module: `217 comparison`."""
    ways = [(number, way) for number, place in enumerate(places(ast.parse(source))) for way in changes(place[3])]
    for number, way in ways:
        tree = ast.parse(source)
        parent, name, index, node = next(place for at, place in enumerate(places(tree)) if at == number)
        line, before = getattr(node, "lineno", 0), ast.unparse(node).splitlines()[0]
        changed = change(node, way)
        if index is None:
            setattr(parent, name, changed)
        else:
            getattr(parent, name)[index] = changed
        yield f"{line} {way}: {before}", ast.fix_missing_locations(tree)


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a module another code."""

    def __init__(self, module: str, path: Path, tree: ast.Module) -> None:
        self.module, self.path, self.code = module, path, compile(tree, path, "exec")

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """The module's, and nobody else's."""
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the changed code."""
        exec(self.code, module.__dict__)


class NoShrinking:
    """Of an example that fails, that it fails is enough."""

    def pytest_configure(self) -> None:
        """After conftest.py chose a profile."""
        from hypothesis import Phase, settings

        quick = settings(max_examples=25, database=None, phases=(Phase.explicit, Phase.generate))
        settings.register_profile("mutants", quick)
        settings.load_profile("mutants")


def outcome(changed: Changed | None, tests: Sequence[str]) -> int:
    """Exit code of pytest in a process of its own, or minus the signal that ended it."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.setsid()  # what its tests start ends with it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        code = 99
        with contextlib.suppress(BaseException):
            import pytest

            if changed:
                sys.meta_path.insert(0, changed)
            words = [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                *LOADED,
                "-m",
                "not slow and not gpu and not alone",
            ]
            code = int(pytest.main([*words, *tests], plugins=[NoShrinking()]))
        os._exit(code)
    until = time.monotonic() + HANGS_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


def main() -> int:
    """Run the tests of each module over a sample of its mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS), metavar="MODULE", help="of TESTS; default: all")
    parser.add_argument("--mutants", type=int, default=25, help="how many of each module, drawn (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    words = parser.parse_args()
    for name in LIBRARIES:
        importlib.import_module(name)
    found: dict[str, dict[str, object]] = {}
    failed = False
    for module in words.modules:
        path = Path(*module.split(".")).with_suffix(".py").absolute()
        every = list(mutants(path.read_text()))
        drawn = sorted(random.Random(words.seed).sample(range(len(every)), min(words.mutants, len(every))))
        began = time.monotonic()
        unchanged = outcome(None, TESTS[module])
        seconds = time.monotonic() - began
        failed |= unchanged != NO_DIFFERENCE
        codes: dict[str, int] = {}
        for at in drawn:
            place, tree = every[at]
            codes[f"{at}: line {place}"] = outcome(Changed(module, path, tree), TESTS[module])
        survived = [place for place, code in codes.items() if code == NO_DIFFERENCE]
        found[module] = {"places": len(every), "mutants": len(codes), "killed": len(codes) - len(survived)}
        found[module] |= {"unchanged": unchanged, "tests_s": round(seconds, 1), "survived": survived}
        sys.stderr.write(f"{module}: {found[module]} ({time.monotonic() - began:.0f} s)\n")
    sys.stdout.write(f"{json.dumps({'seed': words.seed, 'modules': found})}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
