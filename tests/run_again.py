"""pytest, and few failures once more, with nothing beside them: `python -m tests.run_again WORD ...`, words of pytest.

Most tests start programs, which meet in real time on a machine that others use too. Where at most `MOST` tests fail,
they are run again, once, in one process; the last lines count and name those that passed then. A test that is seen
there often asks what the machine decides. What fails twice fails. Must not: run a test a third time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

MOST: Final = 3
"""More failures at once are no disturbance."""


def pytest_code(cache: Path, *words: str) -> int:
    """pytest's exit code, with its cache in a folder of its own."""
    return subprocess.run([sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *words], check=False).returncode


def failed(cache: Path) -> list[str]:
    """The names of the tests, and of files that cannot be loaded, of the run before."""
    file = cache / "v" / "cache" / "lastfailed"
    return list(json.loads(file.read_text())) if file.exists() else []


def main(words: list[str]) -> int:
    """Run the tests; the exit code is pytest's."""
    with tempfile.TemporaryDirectory(prefix="aorta-again-") as folder:
        code = pytest_code(Path(folder), *words)
        names = failed(Path(folder))
        if code != 1 or not 1 <= len(names) <= MOST:
            return code
        _say(f"== {len(names)} test(s) failed, and are run again, alone:", names)
        code = pytest_code(Path(folder), "-n", "0", *names)
        passed = [name for name in names if name not in failed(Path(folder))] if code in (0, 1) else []
    if passed:
        _say(f"== {len(passed)} test(s) passed only when run again, alone:", passed)
    return code


def _say(line: str, names: list[str]) -> None:
    sys.stdout.write("\n   ".join([line, *names]) + "\n")
    sys.stdout.flush()  # pytest writes next, from a process of its own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
