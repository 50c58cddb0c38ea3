"""What `aorta merge` makes of traces written by hand: `merge_cases.json`.

A case has `files` (JSON, or text where digits or damage matter), packed as their names end; the `folders` and `words`
of the command; what it `says` and does not (`unsaid`), its exit `code`, and of the merged trace its complete events,
clocks and ranks. A refusal leaves no file.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from aorta.merge.merge_traces import merge_traces
from tests.merge.traces import load, problems, write

CASES = json.loads((Path(__file__).parent / "merge_cases.json").read_text())["cases"]


def told(path: Path) -> dict[str, Any]:
    """Times with a fraction as text, in which every digit counts."""
    raw = path.read_bytes()
    merged = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw, parse_float=str)
    sync, about = merged["clockSync"], merged["aorta"]
    return {
        "source": sync["source"] and Path(sync["source"]).name,
        "events": [[e["name"], e["pid"], e["ts"], e["dur"]] for e in merged["traceEvents"] if e["ph"] == "X"],
        "base": merged["baseTimeNanoseconds"],
        "aligned": [sync["aligned"], sync["not_aligned_ranks"]],
        "clocks": [[r["rank"], r["offset_ns"], r["drift_ppm"], r["bound_worst_ns"]] for r in sync["ranks"] or ()],
        "counts": {rank: counts["X"] for rank, counts in about["events"].items()},
        "missing": about["ranks_missing"][:3],
        "sources": len(about["merged_from"]),
    }


@pytest.mark.spec("C8", "C10", "C11", "C13", "C14", "C15")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_traces_are_merged_as_expected(
    case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in case["files"].items():
        ((form, value),) = content.items()
        write(tmp_path / name, (json.dumps(value) if form == "json" else value).encode())
    target = tmp_path / "out" / case["target"]
    folders = [str(tmp_path / folder) for folder in case["folders"]]
    assert merge_traces([*folders, "-o", str(target), *case["words"]]) == case["code"]
    said = "".join(capsys.readouterr())
    assert [words for words in case["says"] if words not in said] == []
    assert [words for words in case["unsaid"] if words in said] == []
    assert target.exists() == (case["code"] == 0)
    if target.exists():
        assert problems(load(target)) == []
        assert told(target) == case["expect"]
