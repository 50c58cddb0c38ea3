"""What is in a run folder: records by rank, and a manifest that is read whole or refused in words."""

from __future__ import annotations

import pytest

from aorta.records.run_files import RANK_FILE, RANK_FILE_NAME, rank_files, read_manifest


@pytest.mark.parametrize("rank", [0, 7, 511])
def test_the_name_of_a_record_gives_its_rank_in_plain_decimal(rank):
    found = RANK_FILE_NAME.match(RANK_FILE.format(rank=rank))
    assert found is not None
    assert int(found[1]) == rank


@pytest.mark.parametrize("name", ["rank_0_metrics.jsonl.bak", "rank__metrics.jsonl", "xrank_0_metrics.jsonl"])
def test_other_names_are_not_records(name):
    assert RANK_FILE_NAME.match(name) is None


def test_records_are_listed_by_rank_and_nothing_else_is(tmp_path):
    for name in (*(RANK_FILE.format(rank=rank) for rank in (10, 9)), "rank_x_metrics.jsonl", "run.json"):
        (tmp_path / name).touch()
    (tmp_path / RANK_FILE.format(rank=1)).mkdir()
    assert [path.name for path in rank_files(tmp_path)] == ["rank_9_metrics.jsonl", "rank_10_metrics.jsonl"]
    assert rank_files(tmp_path / "nowhere") == []


def test_the_manifest_is_read_as_it_was_written(tmp_path):
    (tmp_path / "run.json").write_text('{"run_id": "r", "schema_version": 7, "config": {"a": [1, null]}}')
    assert read_manifest(tmp_path) == {"run_id": "r", "schema_version": 7, "config": {"a": [1, None]}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "cut off", "a list", "not text", "deep"],
)
def test_a_manifest_that_is_no_json_object_is_refused_in_words(tmp_path, text, why):
    (tmp_path / "run.json").write_bytes(text)
    with pytest.raises(ValueError, match=why):
        read_manifest(tmp_path)


def test_a_manifest_that_is_not_there_is_told_from_one_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path)
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        read_manifest(tmp_path)
