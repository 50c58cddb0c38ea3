"""What is a launch set, what of it counts, and what is kept of a launch."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from aorta.analysis.aggregate import NO_PIPELINE_METRICS, LabelledRun
from aorta.analysis.compare.launch_set import read_set, samples
from aorta.analysis.load.locations import launch_folders
from aorta.analysis.load.records import load_run
from aorta.analysis.locate import locate
from aorta.analysis.tables import Run
from aorta.errors import InputError
from tests.analysis.builders import header, metrics, simulated_run, step, write_rank
from tests.analysis.by_json import aggregate
from tests.analysis.compare.builders import launch, launch_set


def test_a_folder_of_run_folders_is_a_set_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        launch(tmp_path / str(number), 0.5)
    (tmp_path / "3").mkdir()  # a launch that died before its first line
    (tmp_path / "logs").mkdir()
    assert [folder.name for folder in launch_folders(tmp_path)] == ["1", "2", "3", "10"]


def test_what_is_no_set(tmp_path: Path) -> None:
    launch_set(tmp_path / "run" / "history", [0.5, 0.5])
    launch(tmp_path / "run" / "again", 0.5)
    assert launch_folders(tmp_path / "run") == []  # one run below, and it is not numbered
    launch(tmp_path / "whole", 0.5)
    launch_set(tmp_path / "whole" / "history", [0.5, 0.5])
    assert launch_folders(tmp_path / "whole") == []
    assert launch_folders(tmp_path / "absent") == []
    assert launch_folders("s3://bucket/traces") == []


def test_a_plan_is_told_to_name_its_sides(tmp_path: Path) -> None:
    for side in ("reference", "candidate"):
        launch_set(tmp_path / side, [0.5, 0.5])
    with pytest.raises(InputError, match=r"--reference .*reference --candidate .*candidate"):
        launch_folders(tmp_path)


def test_a_plan_with_one_side_is_told_to_name_that_folder(tmp_path: Path) -> None:
    """Repeats of one configuration: there is nothing to compare them with."""
    launch_set(tmp_path / "reference", [0.5, 0.5])
    (tmp_path / "candidate").mkdir()
    with pytest.raises(InputError, match=r"one launch set, of the reference; give .*/reference$"):
        launch_folders(tmp_path)


def test_a_label_finds_a_set(tmp_path: Path) -> None:
    launch_set(tmp_path / "artifacts" / "cuda", [0.5, 0.5])
    assert locate(["cuda"], tmp_path, tmp_path) == {"cuda": tmp_path / "artifacts" / "cuda"}


def test_the_median_of_a_launch_is_the_one_that_its_report_shows(tmp_path: Path) -> None:
    dataset = LabelledRun("x", load_run(simulated_run(tmp_path, label="x", ranks=3, steps=20)))
    published = aggregate(dataset)["metrics"]
    kept = samples(dataset)
    assert [name for name in published if name not in NO_PIPELINE_METRICS] == [
        name for name in published if name in kept
    ]
    for name, sample in kept.items():
        assert sample.median == published[name]["median"], name
        assert sample.reason == published[name]["reason"], name
        assert bool(len(sample.pool)) == (sample.median is not None)


def test_a_step_without_a_value_does_not_count_in_the_median_of_its_launch(tmp_path: Path) -> None:
    lines = [
        step(0, 2, number, overlap=metrics(10, 8, 4, 4 * ratio, **({"overlap_ratio": None} if ratio == 0 else {})))
        for number, ratio in enumerate((0, 0, 0, 0.5, 0.75))
    ]
    write_rank(tmp_path, header(0, 2), lines)
    kept = samples(LabelledRun("x", load_run(tmp_path)))["overlap_ratio"]
    assert kept.median == 0.625
    assert kept.pool.min() >= 0.5


def test_launches_that_are_not_complete_are_left_out_by_name(tmp_path: Path) -> None:
    good = launch_set(tmp_path, [0.5, 0.6])
    launch(tmp_path / "02", 0.5, endings=["completed", None])
    launch(tmp_path / "03", 0.5)
    (tmp_path / "03" / "rank_1_metrics.jsonl").unlink()
    launch(tmp_path / "04", 0.5)
    (tmp_path / "05").mkdir()
    launch(tmp_path / "06", 0.5, run_id=f"{good.name}-00")
    launch(tmp_path / "07", 0.5)
    for file in (tmp_path / "07").glob("rank*"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"record":"step"' not in line))
    found = read_set(tmp_path, launch_folders(tmp_path), load_run)
    assert [launch.path.name for launch in found.launches] == ["00", "01", "04"]
    said = {path.name: why for path, why in found.left_out}
    assert said["02"] == "rank 1: killed (no footer)"
    assert said["03"] == "1 of 2 ranks are missing (1)"
    assert "no rank_<rank>_metrics.jsonl" in said["05"]
    assert "launches have to be independent" in said["06"]
    assert said["07"] == "0 steps recorded: was recording.step() called?"


def test_a_set_without_a_complete_launch_is_refused(tmp_path: Path) -> None:
    launch_set(tmp_path, [0.5, 0.5], endings=["completed", None])
    with pytest.raises(InputError, match=r"none of its 2 launches is complete:\n.*00: rank 1: killed"):
        read_set(tmp_path, launch_folders(tmp_path), load_run)


def test_the_representative_is_nearest_to_the_median(tmp_path: Path) -> None:
    found = read_set(tmp_path, launch_folders(launch_set(tmp_path, [0.7, 0.2, 0.5, 0.45])), load_run)
    assert found.representative("overlap_ratio").path.name == "02"  # the median is 0.475, and 02 as near as 03
    assert found.representative("not recorded").path.name == "00"


def test_of_launches_that_tie_in_the_ratio_step_time_decides(tmp_path: Path) -> None:
    """One hides as much as the median, but in a step twice as long as any other: its pictures would show a lie."""
    slow, usual, fast = (
        launch(tmp_path / name, ratio, step_ms)
        for name, ratio, step_ms in (("00", 0.5, 200.0), ("01", 0.5, 100.0), ("02", 0.6, 99.0))
    )
    found = read_set(tmp_path, [slow, usual, fast], load_run)
    assert found.representative("overlap_ratio").path == slow
    assert found.representative("overlap_ratio", "job_step_ms").path == usual


def test_one_run_is_held_at_a_time(tmp_path: Path) -> None:
    launch_set(tmp_path, [0.5, 0.6, 0.7])
    launch(tmp_path / "03", 0.5, endings=["completed", None])  # one that is left out is let go of too
    launch(tmp_path / "04", 0.8)
    alive: list[weakref.ref[Run]] = []

    def load(folder: Path) -> Run:
        gc.collect()
        assert sum(run() is not None for run in alive) == 0
        run = load_run(folder)
        alive.append(weakref.ref(run))
        return run

    kept = read_set(tmp_path, launch_folders(tmp_path), load)
    gc.collect()
    assert all(run() is None for run in alive)
    sizes = [sample.pool.nbytes for launch in kept.launches for sample in launch.samples.values()]
    assert max(sizes) <= 200 * np.dtype(float).itemsize
