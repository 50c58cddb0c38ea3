"""What reports make of traces that lack evidence: `python -m benchmarks.evidence_mutants`.

Takes evidence from healthy traces, or renames, moves and doubles it, without changing what the devices did
(`tests.read.mutants`). A report of such a mutant says what it says of the healthy traces, or null, with bounds that
hold that; any other number is wrong. Inputs are a generated job of two ranks in every format, `--drawn` others, of
drawn sizes and names, and the siblings of public cases.

Prints one JSON object last: how many mutants have which outcome, by input, and what is wrong; exit 1 where more than
`--limit` of all mutants are wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.read.answers import answer, judge, shares
from tests.read.evidence_jobs import JOBS, drawn_shape, job
from tests.read.evidence_rows import File
from tests.read.mutants import KINDS, siblings, verdicts


def inputs(drawn: int) -> Iterator[tuple[str, list[File]]]:
    """Yield each input and its traces."""
    yield from ((name, job(name)) for name in JOBS)
    yield from ((f"{name} {seed}", job(name, drawn_shape(seed))) for seed in range(1, drawn + 1) for name in JOBS)


def main() -> int:
    """Judge every mutant of every input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=2, help="jobs that are drawn")
    parser.add_argument("--limit", type=float, default=0.02, help="share of mutants that may be wrong")
    words = parser.parse_args()
    total: Counter[str] = Counter()
    by_input: dict[str, dict[str, int]] = {}
    wrong: dict[str, dict[str, list[str]]] = {}
    for name, files in inputs(words.drawn):
        began = time.monotonic()
        found = verdicts(files)
        by_input[name] = shares(found)
        total.update(by_input[name])
        wrong[name] = {mutant: each.wrong[:4] for mutant, each in found.items() if each.outcome == "wrong"}
        sys.stderr.write(f"{name}: {by_input[name]} ({time.monotonic() - began:.0f} s)\n")
    for kind in KINDS:
        found = {name: judge(each.right, answer(each.files), each.name) for name, each in siblings(kind)}
        by_input[kind] = shares(found)
        total.update(by_input[kind])
        wrong[kind] = {name: each.wrong[:4] for name, each in found.items() if each.outcome == "wrong"}
        sys.stderr.write(f"{kind}: {by_input[kind]}\n")
    count = sum(total.values())
    share = total["wrong"] / count if count else 0.0
    sys.stdout.write(
        json.dumps({"mutants": count, "outcomes": total, "wrong_share": share, "inputs": by_input, "wrong": wrong})
        + "\n"
    )
    return int(share > words.limit)


if __name__ == "__main__":
    raise SystemExit(main())
