"""The quotes of the mutants of C++ fit the sources, so that `scripts/mutants --device` can compile them at any time."""

from __future__ import annotations

from tests.device_path.native_mutants import NATIVE_MUTANTS


def test_quotes_stand_once_and_do_not_overlap() -> None:
    assert len(NATIVE_MUTANTS) >= 70
    ends: dict[str, int] = {}
    for file, (begin, end) in sorted({(mutant.file, mutant.span()) for mutant in NATIVE_MUTANTS}):
        assert begin >= ends.get(file, 0), f"two mutants overlap in {file}, at character {begin}"
        ends[file] = end
    assert len({mutant.name for mutant in NATIVE_MUTANTS}) == len(NATIVE_MUTANTS)
