"""The list of mutants fits the code and the tests as they are, so that `scripts/mutants` can run it at any time."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.device_path.mutants import EQUIVALENT
from tests.device_path.mutants import MUTANTS as DEVICE_MUTANTS
from tests.device_path.native_mutants import NATIVE_MUTANTS
from tests.mutation.mutant import ROOT, CheckedMutant, Mutant
from tests.mutation.rules import MUTANTS


@cache
def _tests_of(file: str) -> frozenset[str]:
    """Names of the tests in a file, or of the files of tests in a folder."""
    path = ROOT / file
    if path.is_dir():
        return frozenset(found.name for found in path.rglob("test_*.py"))
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_there_are_at_least_150_that_are_not_equivalent() -> None:
    assert sum(mutant.equivalent is None for mutant in MUTANTS) >= 150


def test_no_two_are_the_same() -> None:
    assert len({(mutant.module, mutant.name) for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.module, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("module", sorted({mutant.module for mutant in MUTANTS}))
def test_the_old_text_stands_once_and_what_becomes_of_it_is_python(module: str) -> None:
    for mutant in (each for each in MUTANTS if each.module == module):
        ast.parse(mutant.source(), mutant.file)
        assert mutant.old != mutant.new


def test_the_quotes_of_the_device_path_stand_once_and_do_not_overlap() -> None:
    assert len(DEVICE_MUTANTS) >= 40
    assert len(NATIVE_MUTANTS) >= 70
    for mutant in DEVICE_MUTANTS:
        ast.parse(mutant.source(), mutant.file)
        assert mutant.old != mutant.new
    ends: dict[str, int] = {}
    for file, (begin, end) in sorted({(native.file, native.span()) for native in NATIVE_MUTANTS}):
        assert begin >= ends.get(file, 0), f"two mutants overlap in {file}, at character {begin}"
        ends[file] = end
    names = [mutant.name for mutant in DEVICE_MUTANTS]
    assert len(set(names)) == len(names)
    assert len({(native.file, native.name) for native in NATIVE_MUTANTS}) == len(NATIVE_MUTANTS)
    assert set(EQUIVALENT) <= {*names, *(native.name for native in NATIVE_MUTANTS)}


def test_the_tests_that_have_to_notice_are_there() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert name in _tests_of(file) if name else _tests_of(file), f"{mutant.name}: {test}"


def test_an_equivalent_one_has_its_reason() -> None:
    for mutant in MUTANTS:
        assert mutant.equivalent is None or mutant.equivalent.strip()


def test_a_mutant_whose_text_has_changed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gone: the old text stands 0 times in aorta/errors.py"):
        Mutant("gone", "aorta.errors", "this text is nowhere", "").source()
    with pytest.raises(ValueError, match=r"twice"):
        CheckedMutant("twice", "aorta.errors", "class ", "class", ()).source()
