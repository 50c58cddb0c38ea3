"""Change points in a history of launch sets: runs what docs/history.md prints, in a folder of its own.

    python -m benchmarks.history [--nights 40] [--otava COMMAND]

Writes one history in which the step of a commit gets 8 % longer (launches differ by 1 %) and one without a change,
makes Otava's environment as printed (it needs a package index; `--otava` takes an installed one), and fails unless the
commit is named in the first, by all three commands of the page, and none in the second. Prints one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from aorta.report.history import append_rows
from tests.docs.pages import fenced
from tests.runs import ROOT

PAGE = ROOT / "docs" / "history.md"


def write_history(path: Path, nights: int, slower_by: float) -> str:
    """Append a row a night; returns the commit from which on steps are longer."""
    draw, first = np.random.default_rng(1), datetime.now(UTC) - timedelta(days=nights)
    changed = 5 * nights // 8
    for night in range(nights):
        factor = 1 + slower_by * (night >= changed)
        values = [100 * factor, 20 * (1 + 3 * (factor - 1)), 0.6, 5.0] * draw.normal(1, 0.01, 4)
        time = (first + timedelta(days=night)).isoformat(timespec="milliseconds")
        medians = [f"{value:.6g}" for value in values]
        append_rows(path, [(time, f"c{night:06x}", "nightly", "4", *medians, "0123456789ab")])
    return f"c{changed:06x}"


def named_by(command: str, folder: Path) -> list[str]:
    """Return the commits at which a command of the page finds a change of the step or of exposed time."""
    words = [*shlex.split(command), "--metrics", "job_step_ms,exposed_comm_ms", "--output", "json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return [point["attributes"]["commit"] for point in json.loads(done.stdout)["nightly"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=40, metavar="N")
    parser.add_argument("--otava", metavar="COMMAND", help="an installed one")
    options = parser.parse_args()
    _, commands = fenced(PAGE, "bash")
    *installing, analyze = commands.splitlines()
    pinned, rolling = re.findall(r"`(otava/bin/otava analyze .+)`", PAGE.read_text())
    (configuration,) = fenced(PAGE, "yaml")
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "otava.yaml").write_text(configuration)
        for command in () if options.otava else installing:
            subprocess.run(shlex.split(command), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for name, slower_by in (("unchanged", 0.0), ("changed", 0.08)):
            (folder / "history.csv").unlink(missing_ok=True)
            commit = write_history(folder / "history.csv", options.nights, slower_by)
            for kind, command in (("all", analyze), ("pinned", pinned), ("rolling", rolling)):
                printed = command.replace("COMMIT", "c000005")
                if options.otava:
                    printed = printed.replace("otava/bin/otava", options.otava)
                found[f"{name}, {kind}"] = named_by(printed, folder)
    sys.stdout.write(json.dumps({"planted": commit, "found": found}) + "\n")
    wanted = {name: [commit] if name.startswith("changed") else [] for name in found}
    return int(found != wanted)


if __name__ == "__main__":
    sys.exit(main())
