"""Odd and broken traces in a merge. What chance finds goes into the corpus.

`corpus/refused` holds one small file per way of being broken, `corpus/taken` what is odd and kept.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aorta.merge.merge_traces import merge_traces
from tests.merge.traces import load, problems, text, write, x

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("path", sorted((CORPUS / "refused").iterdir()), ids=lambda path: path.name)
def test_a_broken_trace_is_named_and_nothing_is_written(path, tmp_path, capsys):
    shutil.copy(path, tmp_path)
    assert merge_traces([str(tmp_path / path.name), "-o", str(tmp_path / "out" / "merged.json")]) == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / path.name}" in said
    assert len(said) < 2000
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("path", sorted((CORPUS / "taken").iterdir()), ids=lambda path: path.name)
def test_what_names_a_process_or_thread_oddly_is_kept(path, tmp_path):
    target = tmp_path / "merged.json"
    assert merge_traces([str(path), "-o", str(target)]) == 0
    merged = load(target)
    assert problems(merged) == []
    (found,) = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert (found["name"], found["pid"], found["tid"]) == ("aten::mm", 1000, 100_000)


def test_a_thread_that_is_no_number_of_64_bits_keeps_its_digits_as_text(tmp_path):
    target = tmp_path / "merged.json"
    assert merge_traces([str(CORPUS / "taken" / "thread-of-40-digits.json"), "-o", str(target)]) == 0
    names = [event["args"] for event in load(target)["traceEvents"] if event["name"] == "thread_name"]
    assert names == [{"name": "1" * 40, "original_tid": "1" * 40}]


def test_many_missing_ranks_are_counted_and_not_all_named(tmp_path, capsys):
    bad = write(tmp_path / "t.json", text([x("a", 1, 1)], world=5000))
    assert merge_traces([str(bad), "-o", str(tmp_path / "merged.json")]) == 0
    assert "1022, 1023, 1024 and 3975 more" in capsys.readouterr().err
    assert len(load(tmp_path / "merged.json")["aorta"]["ranks_missing"]) == 4999
