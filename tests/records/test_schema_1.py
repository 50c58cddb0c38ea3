"""Records of schema 1 are read for ever: `corpus/jsonl/schema-1` is a run of two ranks as AORTA wrote it then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aorta.analysis.load.records import load_run
from aorta.analysis.load.run_facts import interceptor, manifest_of
from aorta.errors import InputError
from aorta.records.reader import header_of, stream
from aorta.records.run_files import rank_files
from aorta.records.schema import Header
from tests.rank_records import RankRecord, read_rank

RUN = Path(__file__).resolve().parents[1] / "corpus" / "jsonl" / "schema-1"


@pytest.fixture(params=[0, 1])
def path(request) -> Path:
    return rank_files(RUN)[request.param]


def lane_ns(record: RankRecord) -> list[dict[str, int]]:
    """Of each step: lane -> nanoseconds in which its bit is set."""
    return [
        {
            lane: sum(part.end_ns - part.start_ns for part in step.active_segments if part.lanes >> bit & 1)
            for bit, lane in enumerate(record.header.lanes)
        }
        for step in record.steps
    ]


def test_the_sample_is_of_schema_1(path):
    plain = json.loads(path.read_text().splitlines()[0])
    assert plain["schema_version"] == 1
    assert "streams" in plain
    assert "lanes" not in plain


def test_it_is_read_whole_and_its_masks_give_what_each_lane_was_said_to_take(path):
    record = read_rank(path)
    assert (record.problems, len(record.steps), record.footer.reason) == ([], 3, "completed")
    for step, taken in zip(record.steps, lane_ns(record), strict=True):
        assert step.per_stream_ms == {lane: taken[lane] / 1e6 for lane in step.per_stream_ms}
        assert taken["allreduce"] > 0


def test_every_reader_takes_its_lanes_from_streams(path, tmp_path):
    header, rest = path.read_text().split("\n", 1)
    plain = json.loads(header)
    plain["streams"].reverse()
    turned = tmp_path / "rank_0_metrics.jsonl"
    turned.write_text(json.dumps(plain | {"rank": 0}) + "\n" + rest.replace('"rank":1', '"rank":0'))
    lanes = tuple(plain["streams"])
    assert lanes[0] == "aux"
    assert header_of(turned).lanes == read_rank(turned).header.lanes == lanes
    assert [line.lanes for line in stream(turned, []) if isinstance(line, Header)] == [lanes]
    assert load_run(tmp_path).source.lanes == lanes


def test_wrong_lanes_of_schema_1_are_refused(path, tmp_path):
    broken = tmp_path / path.name
    broken.write_text(path.read_text().replace('"streams":["compute"', '"streams":[7', 1))
    with pytest.raises(InputError, match=rf"{path.name}:1: expected a header line .*Expected `str`, got `int`"):
        header_of(broken)


def test_its_manifest_is_used_and_says_what_timed_its_collectives():
    run = load_run(RUN)
    assert run.health.ranks_read == (0, 1)
    manifest, why_not = manifest_of(RUN, run.source.identity)
    assert why_not is None
    assert manifest["schema_version"] == 1
    assert interceptor(manifest) == "python"
