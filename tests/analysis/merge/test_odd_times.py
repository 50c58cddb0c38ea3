"""Times and names that say less than they should: read, or an error that names the file."""

from __future__ import annotations

import pytest

from tests.analysis.merge.test_merging import merge
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
