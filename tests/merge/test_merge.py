"""Many traces into one: nothing lost, nothing confused, on one clock; odd and broken ones (`corpus/`) kept or named.

A case of `merge_cases.json` has `files` (JSON, or text where digits or damage matter), packed as their names end; the
`folders` and `words` of the command; what it `says` and does not (`unsaid`), its exit `code`, and of the merged trace
its complete events, clocks and ranks. A refusal leaves no file.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aorta.merge.merge_traces import merge_traces
from tests.merge.traces import flow, load, problems, text, write, x

FOLDER = Path(__file__).parent
CASES = json.loads((FOLDER / "merge_cases.json").read_text())["cases"]


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


@pytest.mark.parametrize("path", sorted((FOLDER / "corpus" / "refused").iterdir()), ids=lambda path: path.name)
def test_a_broken_trace_is_named_and_nothing_is_written(path, tmp_path, capsys):
    shutil.copy(path, tmp_path)
    assert merge_traces([str(tmp_path / path.name), "-o", str(tmp_path / "out" / "merged.json")]) == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / path.name}" in said
    assert len(said) < 2000
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("path", sorted((FOLDER / "corpus" / "taken").iterdir()), ids=lambda path: path.name)
def test_what_names_a_process_or_thread_oddly_is_kept(path, tmp_path):
    target = tmp_path / "merged.json"
    assert merge_traces([str(path), "-o", str(target)]) == 0
    merged = load(target)
    assert problems(merged) == []
    (found,) = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert (found["name"], found["pid"], found["tid"]) == ("aten::mm", 1000, 100_000)
    if path.name == "thread-of-40-digits.json":  # no number of 64 bits: it keeps its digits as text
        names = [event["args"] for event in merged["traceEvents"] if event["name"] == "thread_name"]
        assert names == [{"name": "1" * 40, "original_tid": "1" * 40}]


@pytest.mark.spec("C11")
def test_C11_numbers_that_meet_in_two_traces_are_kept_apart(tmp_path):
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python3"}},
        x("a", 1, 5, tid=5),
        x("gpu", 2, 5, pid=0, tid=7),
        x("span", 0, 9, pid="Spans", tid="PyTorch Profiler"),
        *(flow(phase, ident, ts, tid=5) for ident in (1, "0x7f") for phase, ts in (("s", 1.5), ("f", 3.5))),
        *({"ph": ph, "cat": "async", "name": "n", "id2": {"local": 3}, "pid": 77, "tid": 5, "ts": 1} for ph in "be"),
        {"ph": "C", "name": "memory", "pid": 77, "tid": 5, "ts": 2, "args": {"bytes": 3}},
        {"ph": "i", "s": "g", "name": "mark", "pid": "", "tid": "", "ts": 2},
    ]
    for rank in (0, 1):
        write(tmp_path / "run" / f"r{rank}.json", text(events, rank=rank))
    assert merge_traces([str(tmp_path / "run"), "-o", str(tmp_path / "merged.json")]) == 0
    merged = load(tmp_path / "merged.json")
    assert problems(merged) == []
    found, before = merged["traceEvents"], Counter(event["ph"] for event in events[1:])
    of_rank = [[e for e in found if e["pid"] // 1000 == rank and e["ph"] != "M"] for rank in (1, 2)]
    assert [Counter(e["ph"] for e in own) for own in of_rank] == [before, before]
    for key in ("pid", "tid", "id"):
        apart = [{e[key] for e in own if key in e} for own in of_rank]
        assert not apart[0] & apart[1], key
    assert len({(e["cat"], e["id"]) for e in found if e["ph"] == "s"}) == 4
    assert len({e["id2"]["local"] for e in found if "id2" in e}) == 2
    names = {(e["pid"], e["args"]["name"], e["args"]["original_pid"]) for e in found if e["name"] == "process_name"}
    assert names >= {(1000, "rank 0 (node0)", 77), (2000, "rank 1 (node0)", 77)}
    assert {original for _, _, original in names} == {77, 0, "Spans", ""}
    assert {e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index" and e["pid"] == 1000} == {1000}
    assert "PyTorch Profiler" in {e["args"]["name"] for e in found if e["name"] == "thread_name"}


def test_an_earlier_file_is_kept_unless_told(tmp_path, capsys):
    target = tmp_path / "merged.json"
    for name, words, code, kept in (("a", [], 0, "a"), ("b", [], 2, "a"), ("b", ["--overwrite"], 0, "b")):
        write(tmp_path / "run" / "r0.json", text([x(name, 1, 1)], world=1))
        assert merge_traces([str(tmp_path / "run"), "-o", str(target), *words]) == code
        assert [event["name"] for event in load(target)["traceEvents"] if event["ph"] == "X"] == [kept]
        assert ("exists; --overwrite replaces it" in capsys.readouterr().err) == (code == 2)
