"""Times and names that say less than they should: read, or an error that names the file."""

from __future__ import annotations

import pytest

from aorta.records.clock_offsets import ClockSync, encode
from tests.analysis.merge.test_merge_traces import clock, merge, write_sync
from tests.analysis.merge.traces import text, write, x


def test_a_name_with_two_ranks_is_not_guessed_from(tmp_path, capsys):
    bad = write(tmp_path / "run" / "rank1_of_rank0.json", text([x("a", 1, 1)], rank=None))
    assert merge(tmp_path / "run", code=2) is None
    assert f"{bad}: which rank is this?" in capsys.readouterr().err


@pytest.mark.parametrize("align", ["clock", "start_profile"])
def test_a_time_in_quotes_is_a_time(tmp_path, align):
    body = text([x("a", "@", 1)], world=1).replace(b'"ts": @', b'"ts": "150.5"')
    write(tmp_path / "run" / "t.json", body)
    (found,) = [e for e in merge(tmp_path / "run", "--align", align)["traceEvents"] if e["ph"] == "X"]
    assert found["ts"] == 150.5


@pytest.mark.parametrize("value", ["null", '"soon"', "NaN", "[]"])
def test_a_first_time_that_is_no_number_names_the_file(tmp_path, capsys, value):
    body = text([x("a", "@", 1), x("b", 2, 1)]).replace(b'"ts": @', f'"ts": {value}'.encode())
    assert value.encode() in body
    bad = write(tmp_path / "run" / "bad.json", body)
    assert merge(tmp_path / "run", code=2) is None
    assert str(bad) in capsys.readouterr().err


def test_only_the_nearest_clock_measurement_of_a_trace_is_that_of_its_run(tmp_path):
    other = ClockSync(1, "run-2", 0, 0, "CLOCK_REALTIME", "c10d store", True, [clock(0), clock(1, 9_000_000)])
    (tmp_path / "clock_sync.json").write_bytes(encode(other))
    folder = tmp_path / "run"
    for rank in (0, 1):
        write(folder / f"rank{rank}" / "t.json", text([x("a", 150, 1)], rank=rank))
    write_sync(folder, clock(0), clock(1, 10_000))
    found = {e["pid"]: e["ts"] for e in merge(folder)["traceEvents"] if e["ph"] == "X"}
    assert found == {1000: 150, 2000: 140}
