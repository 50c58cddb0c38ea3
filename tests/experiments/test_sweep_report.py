"""The report of a sweep: a row for every job, a heat map that colours only what is known."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from aorta.analysis.report.charts import style
from aorta.errors import InputError
from aorta.experiments.journal import JobEnded, JobHistory, JobPlanned, Sweep
from aorta.experiments.launch_medians import LaunchMedians
from aorta.experiments.sweep_report import NO_JOB, HeatGrid, JobRow, SweepReport, draw, main
from tests.analysis.builders import footer, header, metrics, step, write_rank
from tests.experiments.test_journal import ASKED, write


def row(name, words, ratio=None, status="done", **more):
    """A job whose run has `overlap_ratio` and twice that in `job_step_ms`."""
    value = {} if ratio is None else {"overlap_ratio": ratio, "job_step_ms": 2 * ratio}
    ended = None if status == "not run" else JobEnded(name, status, 0, 1.0, ratio, more.get("reason"))
    result = LaunchMedians(value, {} if value else {"overlap_ratio": "no communication"}, 10)
    return JobRow(JobHistory(name, tuple(words), ended), result)


ROWS = [
    row("00", ["y=b", "x=10"], 0.1),
    row("01", ["y=b", "x=2"], 0.2),
    row("02", ["y=a", "x=10"], status="failed", reason="exit code 5"),
    row("03", ["y=a", "x=2"]),
    row("04", ["y=c", "x=2"], 0.4),
]


def report_of(rows, folder=Path()):
    return SweepReport(Sweep(folder, ASKED, tuple(each.job for each in rows)), tuple(rows))


def arrange(rows, metric: str, x_key: str, y_key: str) -> HeatGrid:
    return report_of(rows).heat_map(metric, x_key, y_key)


def test_cells_stand_where_their_keys_say(tmp_path):
    grid = arrange(ROWS, "overlap_ratio", "x", "y")
    assert (grid.x, grid.y) == (("2", "10"), ("b", "a", "c"))  # numbers by size, words as they came
    assert [[cell.value for cell in line] for line in grid.cells] == [[0.2, 0.1], [None, None], [0.4, None]]
    assert [[cell.why for cell in line] for line in grid.cells] == [[None, None], ["null", "failed"], [None, NO_JOB]]


def test_jobs_that_share_a_cell_give_their_median():
    rows = [row(f"0{n}", ["x=1", "y=1", f"z={n}"], value) for n, value in enumerate((0.1, 0.7, 0.2))]
    ((cell,),) = arrange(rows, "overlap_ratio", "x", "y").cells
    assert (cell.value, cell.jobs) == (0.2, 3)


@pytest.mark.parametrize(
    ("keys", "said"),
    [(("x", "w"), "no job of this sweep was given that key; there are y, x"), (("x", "x"), "two different keys")],
)
def test_axes_that_do_not_serve(keys, said):
    with pytest.raises(InputError, match=said):
        arrange(ROWS, "overlap_ratio", *keys)


def test_an_axis_with_too_many_values():
    rows = [row(str(n), [f"x={n}", "y=1"], 0.5) for n in range(41)]
    with pytest.raises(InputError, match="--heat x: 41 values; a heat map takes at most 40"):
        arrange(rows, "overlap_ratio", "x", "y")


def drawn(monkeypatch, tmp_path, rows, metric="overlap_ratio"):
    """The figure that would be saved."""
    figures = []
    monkeypatch.setattr(style, "save", lambda figure, path: figures.append(figure))
    assert draw(arrange(rows, metric, "x", "y"), "title", tmp_path / "heat.png") is None
    return figures[0].axes[0]


def test_every_cell_says_its_value_and_the_others_are_hatched_and_named(monkeypatch, tmp_path):
    axes = drawn(monkeypatch, tmp_path, ROWS)
    said = {text.get_position(): text.get_text() for text in axes.texts}
    assert said == {
        (0, 0): "0.200",
        (1, 0): "0.100",
        (0, 1): "null",
        (1, 1): "failed",
        (0, 2): "0.400",
        (1, 2): "no job",
    }
    cells = {
        (round(patch.get_x() + 0.5), round(patch.get_y() + 0.5)): patch.get_hatch()
        for patch in axes.patches
        if isinstance(patch, Rectangle)
    }
    assert {place for place, hatch in cells.items() if hatch} == {(0, 1), (1, 1), (1, 2)}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "10"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")


def lightness(patch):
    red, green, blue, _ = patch.get_facecolor()
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("metric", "best"), [("overlap_ratio", 0.4), ("job_step_ms", 0.2)])
def test_the_better_cell_is_the_lighter_one_and_its_ink_can_be_read(monkeypatch, tmp_path, metric, best):
    axes = drawn(monkeypatch, tmp_path, ROWS, metric)
    factor = 2 if metric == "job_step_ms" else 1
    shades = {}
    for patch in (patch for patch in axes.patches if not patch.get_hatch()):
        place = (round(patch.get_x() + 0.5), round(patch.get_y() + 0.5))
        (text,) = (text for text in axes.texts if text.get_position() == place)
        shades[round(float(text.get_text()) / factor, 3)] = lightness(patch)
        assert (to_hex(text.get_color()) == "#ffffff") == (lightness(patch) < 0.55)
    assert max(shades, key=shades.get) == (best if metric == "overlap_ratio" else 0.1)


def test_equal_values_can_be_drawn(monkeypatch, tmp_path):
    rows = [row("00", ["x=1", "y=1"], 0.5), row("01", ["x=2", "y=1"], 0.5)]
    assert [text.get_text() for text in drawn(monkeypatch, tmp_path, rows).texts] == ["0.500", "0.500"]


def test_nothing_known_draws_nothing(tmp_path):
    path = tmp_path / "heat.png"
    grid = arrange([row("00", ["x=1", "y=1"])], "overlap_ratio", "x", "y")
    assert draw(grid, "title", path) == "overlap_ratio has no value in any job"
    assert not path.exists()


def test_the_csv_has_a_row_for_every_job_and_no_number_for_the_unknown():
    lines = list(csv.DictReader(io.StringIO(report_of(ROWS).as_csv())))
    assert [line["job"] for line in lines] == ["00", "01", "02", "03", "04"]
    assert [line["overlap_ratio"] for line in lines] == ["0.1", "0.2", "", "", "0.4"]
    assert [line["job_step_ms"] for line in lines] == ["0.2", "0.4", "", "", "0.8"]
    assert [line["x"] for line in lines] == ["10", "2", "10", "2", "2"]
    assert [line["rank_steps"] for line in lines] == ["10", "10", "", "10", "10"]
    assert [line["reason"] for line in lines] == ["", "", "failed: exit code 5", "no communication", ""]


def test_the_text_names_what_is_missing():
    text = report_of(ROWS).as_text(["overlap_ratio"])
    assert "! 02: failed: exit code 5" in text
    assert "! 03 overlap_ratio: no communication" in text
    assert "EMULATED" not in text


def test_the_command_reads_runs_and_writes_its_files(tmp_path, capsys):
    folder = tmp_path / "sizes"
    folder.mkdir()
    words = [["x=1", "y=1"], ["x=2", "y=1"], ["x=1", "y=2"], ["x=2", "y=2"]]
    ends = [JobEnded("00", "done", 0, 1.0, 0.5, None), JobEnded("01", "done", 0, 1.0, None, None)]
    ends.append(JobEnded("02", "failed", 1, 1.0, None, "exit code 1"))
    write(folder, *(JobPlanned(f"0{n}", each) for n, each in enumerate(words)), *ends)
    (folder / "00").mkdir()
    for rank in range(2):
        steps = [step(rank, 2, global_step=n, overlap=metrics(10.0 + n, 6.0, 4.0, 3.0)) for n in range(5)]
        write_rank(folder / "00", header(rank, 2), [*steps, footer(5, 2)])
    assert main([str(folder), "--output", str(tmp_path / "out"), "--metric", "job_step_ms"]) == 0
    said = capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").read_text().splitlines()))
    assert (rows[0]["job_step_ms"], rows[0]["overlap_ratio"], rows[0]["rank_steps"]) == ("12.0", "0.75", "10")
    assert [line["status"] for line in rows] == ["done", "done", "failed", "not run"]
    assert "No such file or directory" in rows[1]["reason"]  # its folder is gone since
    assert (tmp_path / "out" / "heat_job_step_ms.png").read_bytes().startswith(b"\x89PNG")
    assert "12.000" in said
    assert "! 03: not run" in said


def test_words_that_do_not_serve(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "give the folder of a sweep" in capsys.readouterr().err
    write(tmp_path, JobPlanned("00", ["x=1"]))
    assert main([str(tmp_path), "--metric", "overlap_ration"]) == 2
    assert "--metric=overlap_ration: no metric of a run; there are job_step_ms" in capsys.readouterr().err
    assert main([str(tmp_path), "--heat", "x", "y", "--output", str(tmp_path / "o")]) == 2
    assert "--heat y: no job of this sweep was given that key" in capsys.readouterr().err
