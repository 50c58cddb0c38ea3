"""Makes the pictures of the documents again: `python -m benchmarks.docs_pictures` writes them to `docs/images`.

Those of the demo come from `aorta demo`, the heat map from the two commands that docs/search.md prints. Prints one line
of JSON: the files written, and the load average before, since the times in the pictures are of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runs import ROOT, environment

IMAGES = ROOT / "docs" / "images"
OF_DEMO = ("side_by_side.png", "reference_breakdown.png", "candidate_breakdown.png", "overlap_ratio.png")
_SWEEP = "sizes"
"""Label of the sweep in docs/search.md."""


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        _run(here, "-m", "aorta", "demo")
        pictures = [here / "reports" / "demo" / name for name in OF_DEMO]
        for words in _sweep_commands():
            _run(here, "-m", "aorta", *words)
        (heat,) = (here / "reports" / f"sweep-{_SWEEP}").glob("*heat*.png")
        for picture in pictures:
            shutil.copyfile(picture, IMAGES / picture.name)
        shutil.copyfile(heat, IMAGES / "sweep_heat.png")
    written = [str((IMAGES / name).relative_to(ROOT)) for name in (*OF_DEMO, "sweep_heat.png")]
    sys.stdout.write(json.dumps({"written": written, "load_average": round(load, 1)}) + "\n")
    return 0


def _sweep_commands() -> list[list[str]]:
    """The arguments of `aorta` in the sweep and its report, as docs/search.md prints them."""
    lines = (ROOT / "docs" / "search.md").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line.startswith("aorta ") and _SWEEP in line]
    return [shlex.split(line)[1:] for line in wanted[:2]]


def _run(folder: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(HOME=str(folder), PYTHONPATH=str(ROOT)),
        stdout=sys.stderr,
        check=True,
    )


if __name__ == "__main__":
    sys.exit(main())
