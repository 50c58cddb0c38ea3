"""`aorta report --append`: a row a launch set, added whole and once, by several processes at once."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.errors import InputError
from aorta.report.command import overlap_report
from aorta.report.history import COLUMNS, append_rows, rows_of
from tests.analysis.compare.builders import launch_set
from tests.read.kineto_files import document, kernel, step
from tests.runs import ROOT, environment

HEADER = ",".join(COLUMNS) + "\n"


def row(number: int, label: str = "nightly") -> tuple[str, ...]:
    return (f"2026-01-{number:02}T00:00:00.000+00:00", "abc", label, "4", "100", "9", "0.5", "", "0123456789ab")


FIRST = HEADER + ",".join(row(1))


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_a_launch_set_with_the_medians_of_its_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for side, step_ms in (("reference", 100.0), ("candidate", 120.0)):
        launch_set(tmp_path / "ab" / side, [0.8, 0.81, 0.82, 0.83], [step_ms + number for number in range(4)])
    for said in ("2 rows appended", "0 rows appended"):
        assert overlap_report(["ab", "--append", "history.csv", "--no-html"]) == 0
        assert f"history.csv: {said}" in capsys.readouterr().out
    reference, candidate = rows_in(tmp_path / "history.csv")
    assert (reference["label"], candidate["label"]) == ("reference", "candidate")
    assert (reference["job_step_ms"], candidate["job_step_ms"]) == ("101.5", "121.5")
    assert (reference["overlap_ratio"], reference["launches"]) == ("0.815", "4")
    assert reference["environment"] == candidate["environment"]
    assert datetime.fromisoformat(reference["time"]).utcoffset() is not None


def test_no_label_is_a_formula_of_a_spreadsheet(tmp_path):
    folder = launch_set(tmp_path / "reference", [0.8, 0.81])
    (made,) = rows_of(read_subjects({"=1+1": folder}, Rules()))
    assert made[COLUMNS.index("label")] == "'=1+1"


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        ("", HEADER),
        (HEADER, HEADER),
        (HEADER.rstrip("\n"), HEADER),
        (FIRST, FIRST + "\n"),  # an editor left out the last line break
        (FIRST + "\n2026-01-02T00:00:00.0", FIRST + "\n"),
        (FIRST + "\n" + ",".join(row(2))[:-5], FIRST + "\n"),
    ],
)
def test_what_is_there_stays_but_for_half_a_line(tmp_path, capsys, there, kept):
    path = tmp_path / "history.csv"
    path.write_text(there)
    assert append_rows(path, [row(3), row(3, "other")]) == [row(3), row(3, "other")]
    assert path.read_text() == kept + ",".join(row(3)) + "\n" + ",".join(row(3, "other")) + "\n"
    assert ("cut short" in capsys.readouterr().err) == (len(there) > len(kept))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_text("time,step_ms\n1,2\n"), "its header is 'time,step_ms', and must be 'time,comm"),
        (lambda path: path.write_bytes(b"\xff\xfe\n"), "its header is "),
        (lambda path: path.mkdir(), "cannot be written"),
        (lambda path: path.symlink_to("elsewhere"), "cannot be written"),
    ],
)
def test_another_file_is_refused_before_anything_is_read(tmp_path, capsys, make, said):
    make(path := tmp_path / "history.csv")
    assert overlap_report([str(launch_set(tmp_path / "set", [0.8])), "--append", str(path)]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(InputError):
        append_rows(path, [row(1)])


def test_traces_have_no_place_in_it(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(document([step(1, 0, 100), kernel("gemm", 0, 50)])))
    assert overlap_report([str(trace), "--append", str(tmp_path / "h.csv"), "--output", str(tmp_path / "out")]) == 2
    assert "when it ran is not known" in capsys.readouterr().err


def test_processes_append_at_once(tmp_path):
    path, count = tmp_path / "history.csv", 40
    code = (
        "import sys; from pathlib import Path; from aorta.report.history import append_rows\n"
        f"for number in range({count}):\n"
        "    row = f'{number}', 'c', sys.argv[2], '4', '1', '2', '0.5', '', '0123456789ab'\n"
        "    append_rows(Path(sys.argv[1]), [row])"
    )
    own = environment(PYTHONPATH=str(ROOT))
    started = [subprocess.Popen([sys.executable, "-c", code, str(path), label], env=own) for label in "abc"]
    assert [process.wait() for process in started] == [0, 0, 0]
    found = rows_in(path)
    assert sorted((each["label"], int(each["time"])) for each in found) == [
        (label, number) for label in "abc" for number in range(count)
    ]
