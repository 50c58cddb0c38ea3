"""The end of a run, in one process: what is written before what may take long."""

from __future__ import annotations

import json
import os
import signal

import pytest

from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE
from aorta.runner import rank_process, recorded_run, train
from tests.loop import resolved
from tests.runs import SMALL, environment, record
from tests.runs import train as train_in_launch


@pytest.mark.parametrize("stopped_by", [None, signal.SIGTERM], ids=["completed", "stopped"])
def test_the_clocks_are_measured_behind_the_footer_and_not_after_a_signal(tmp_path, monkeypatch, stopped_by):
    footers = []

    class Clocks(recorded_run.ClockSynchronisation):
        def at_end(self):
            footers.append(record(tmp_path).footer)
            return super().at_end()

    class Agreement(train.StopAgreement):
        def may_start(self, step):
            if step == 1 and stopped_by:
                signal.raise_signal(stopped_by)
            return super().may_start(step)

    monkeypatch.setattr(recorded_run, "ClockSynchronisation", Clocks)
    monkeypatch.setattr(train, "StopAgreement", Agreement)
    monkeypatch.setattr(rank_process, "start_logging", lambda *_: None)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    words = ("training.max_steps=2", "training.device=cpu")
    code = train.run_training(resolved(*SMALL, *words, f"training.output_dir={tmp_path}"))
    if stopped_by:
        assert code == SIGNAL_EXIT_BASE + stopped_by
        assert footers == []
    else:
        assert code == EXIT_OK
        assert [footer.reason for footer in footers] == ["completed"]


@pytest.mark.thorough
@pytest.mark.spec("D30")
def test_a_small_data_set_is_repeated_for_as_many_steps_as_asked_for(tmp_path):
    train_in_launch(tmp_path, "training.max_steps=7", "dataset.num_samples=24", "training.batch_size=8", ranks=1)
    steps = record(tmp_path).steps
    assert [(step.epoch, step.step, step.global_step) for step in steps] == [
        (0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4), (1, 2, 5), (2, 0, 6)
    ]  # fmt: skip
    assert json.loads((tmp_path / "run.json").read_text())["steps_planned"] == 7


def test_one_rank_says_at_its_end_and_in_its_manifest_that_it_had_no_communication(tmp_path):
    said = "one rank: it has no other rank to communicate with"
    errors = train_in_launch(tmp_path, ranks=1).stderr
    assert said in errors.strip().splitlines()[-1]
    assert "--nproc_per_node" in errors.strip().splitlines()[-1]
    (warning,) = json.loads((tmp_path / "run.json").read_text())["warnings"]
    assert warning.startswith(said)
