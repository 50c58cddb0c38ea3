"""Runs what holds the device path with each of its mutants, and says which of them nothing notices.

    scripts/mutants --device                   # all of them, one at a time
    scripts/mutants --device --only 'clock'    # those whose file or name has it; a regular expression

Mutants of C++ are switched at run time: one build, then some seconds each. A mutant is noticed by a wrong answer of the
loop or of a test of `test_rules`, by an exception, or by a rank that does not come to its end. Exit code: 0 when every
mutant that is not named equivalent is noticed, 1 when one is not, 2 when something is noticed on the code as it is.
Must not: change a source.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from tests.device_path.mutants import EQUIVALENT, MUTANTS
from tests.device_path.native_mutants import NATIVE_MUTANTS
from tests.simulated import load

AS_IT_IS: Final = ""
"""In the place of a mutant's name."""
Told = list[dict[str, Any]]


def main(pattern: str, limit_s: float) -> int:
    """Run the mutants whose file or name has the pattern; the exit code."""
    os.environ.setdefault(load.VARIABLE, "virtual")
    load.load()
    load.for_children()
    from tests.device_path.switched import build

    chosen = [(mutant.tap, mutant.name, {}, mutant.file) for mutant in MUTANTS]
    folder = str(build())
    for number, native in enumerate(NATIVE_MUTANTS, 1):
        chosen.append(("compiled", native.name, {"AORTA_MUTANT": str(number), "XDG_CACHE_HOME": folder}, native.file))
    chosen = [one for one in chosen if re.search(pattern, f"{one[3]}: {one[1]}")]
    for tap in ("python", "compiled"):
        if why := _noticed(tap, AS_IT_IS, {"XDG_CACHE_HOME": folder}, limit_s):
            _say(f"the code as it is ({tap}): {why}")
            return 2
    survivors, equivalents, begun_s = [], 0, time.monotonic()
    for number, (tap, name, variables, file) in enumerate(chosen, 1):
        since_s = time.monotonic()
        why = _noticed(tap, name, variables, limit_s)
        _say(f"[{number}/{len(chosen)}] {time.monotonic() - since_s:5.1f} s  {file}: {name}: {why or 'SURVIVED'}")
        equivalents += name in EQUIVALENT
        if why is None and name not in EQUIVALENT:
            survivors.append(f"{file}: {name}")
    wanted = len(chosen) - equivalents
    for survivor in survivors:
        _say(f"survived: {survivor}")
    share = f" ({(wanted - len(survivors)) / wanted:.1%})" if wanted else ""
    _say(
        f"{wanted - len(survivors)} of {wanted} mutants killed{share} in {time.monotonic() - begun_s:.0f} s; "
        f"{equivalents} more are named equivalent"
    )
    return 1 if survivors else 0


def _noticed(tap: str, name: str, variables: dict[str, str], limit_s: float) -> str | None:
    """What notices a mutant first; None: nothing."""
    from tests.device_path.launch import on_devices

    python = name if "AORTA_MUTANT" not in variables else AS_IT_IS
    with tempfile.TemporaryDirectory(prefix="aorta-mutants-") as folder:
        try:
            told = on_devices(
                "tests.device_path.program_mutants", Path(folder, "two"), tap, python, timeout_s=limit_s, **variables
            )
            if why := first_failure([rank[python] for rank in told], tap, "told"):
                return why
            peers = on_devices(
                "tests.device_path.program_peers",
                Path(folder, "three"),
                tap,
                python,
                ranks=3,
                timeout_s=limit_s,
                **variables,
            )
            return first_failure(peers, tap, "peers")
        except subprocess.TimeoutExpired:
            return f"takes longer than {limit_s:.0f} s"
        except AssertionError as error:
            return f"ends with {str(error).strip().splitlines()[-1]}"


def first_failure(told: Told, tap: str, fixture: str) -> str | None:
    """What is wrong with a loop, or the first test of `test_rules` that fails with these answers; None: nothing."""
    from tests.device_path import test_rules

    if fixture == "told":
        if wrong := [one for rank in told for way in rank.values() for one in way.get("wrong", ())]:
            return str(wrong[0])[:160]
        if not all("scenes" in rank for rank in told):
            return "needs more memory or events"
    for name, test in vars(test_rules).items():
        if name.startswith("test_") and fixture in inspect.signature(test).parameters:
            for words in _arguments(test, tap):
                try:
                    test(told, **words)
                except (AssertionError, ValueError, LookupError, TypeError):
                    return f"{name} {' '.join(words.values())}"
    return None


def _arguments(test: Any, tap: str) -> list[dict[str, str]]:
    """What a test of `test_rules` is called with besides the answers, as far as it concerns the tap."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            name, values = mark.args
            if name == "mode":  # these tests are of one tap
                return [{name: value} for value in values] if tap == "python" else []
            return [{name: value} for value in values if value.endswith(tap)]
    return [{}] if tap == "python" else []


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
