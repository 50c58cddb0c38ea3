"""Runs that observe one of several steps: which ones, what their records hold, and that training is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aorta.config.loop import observed_every
from aorta.errors import ConfigError
from aorta.instrument.sampling import LEAST_OBSERVED, MEASURED, drawn, seed_of
from aorta.timeline.overlap import NOT_SAMPLED
from tests.rank_records import read_rank
from tests.runs import train

EVERY, STEPS = 4, 24


@pytest.mark.dist
@pytest.mark.parametrize("words", [("parallel=ddp",), pytest.param(("parallel=fsdp",), marks=pytest.mark.thorough)])
def test_ranks_observe_the_same_steps_and_train_as_ever(tmp_path: Path, words: tuple[str, ...]) -> None:
    more = (*words, f"training.max_steps={STEPS}", "training.checkpoint_interval=10")
    train(tmp_path / "whole", *more)
    train(tmp_path / "sampled", *more, f"instrument.every={EVERY}")
    run_id = json.loads((tmp_path / "sampled" / "run.json").read_text())["run_id"]
    expected = [number for number in range(STEPS) if drawn(number, EVERY, seed_of(run_id))]
    for rank in range(2):
        whole, sampled = (read_rank(tmp_path / side / f"rank_{rank}_metrics.jsonl") for side in ("whole", "sampled"))
        assert [line.loss for line in sampled.steps] == [line.loss for line in whole.steps]
        assert [line.global_step for line in sampled.steps if line.coverage.complete] == expected
        assert sampled.header.every == str(EVERY)
        for line, as_ever in zip(sampled.steps, whole.steps, strict=True):
            if line.global_step in expected:
                assert line.drawn == EVERY
                assert [row.kind for row in line.collectives] == [row.kind for row in as_ever.collectives]
                assert None not in (line.overlap["compute_ms"], line.overlap["comm_ms"])
                assert line.compute
                assert line.aux
            else:
                assert line.coverage.reason == NOT_SAMPLED
                assert set(line.overlap) == {"window_ms", "aorta_ms"}
                assert (line.collectives, line.compute, line.stalls, line.aux) == ([], [], [], [])
                assert line.coverage.unwatched == 0
    # Collectives are numbered in every step, so that those of ranks match.
    numbers = [
        [
            (row.group, row.seq)
            for line in read_rank(tmp_path / "sampled" / f"rank_{rank}_metrics.jsonl").steps
            for row in line.collectives
        ]
        for rank in range(2)
    ]
    assert numbers[0] == numbers[1]
    assert len({*numbers[0]}) == len(numbers[0])
    assert max(seq for _, seq in numbers[0]) > 2 * len(numbers[0])


@pytest.mark.dist
def test_auto_chooses_one_number_for_all_ranks_and_says_which(tmp_path: Path) -> None:
    done = train(tmp_path, "training.max_steps=40", "instrument.every=auto", "telemetry.warmup_steps=2")
    manifest = json.loads((tmp_path / "run.json").read_text())
    sampling = manifest["sampling"]
    assert sampling["asked"] == "auto"
    assert f"instrument.every=auto: 1 in {sampling['every']} steps is observed" in done.stderr + done.stdout
    assert sampling["seed"] == seed_of(manifest["run_id"])
    assert sampling["observed_us"] > sampling["passed_us"] > 0
    ranks = [read_rank(tmp_path / f"rank_{rank}_metrics.jsonl").steps for rank in range(2)]
    observed = [[line.global_step for line in steps if line.coverage.complete] for steps in ranks]
    assert observed[0] == observed[1]
    assert observed[0][:LEAST_OBSERVED] == list(range(LEAST_OBSERVED))
    assert not [step for step in observed[0] if LEAST_OBSERVED <= step < LEAST_OBSERVED + MEASURED]
    later = [step for step in observed[0] if step >= sampling["from_step"]]
    assert later == [
        step for step in range(sampling["from_step"], 40) if drawn(step, sampling["every"], sampling["seed"])
    ]
    assert [line.drawn for line in ranks[0][:LEAST_OBSERVED]] == [0] * LEAST_OBSERVED


@pytest.mark.parametrize("setting", ["0", "-1", "1.5", "often", "", "1000001"])
def test_a_setting_that_is_no_number_of_steps_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"instrument.every=.*: must be auto, or a number of steps from 1 to 1000000"):
        observed_every(setting)


def test_auto_and_numbers_are_settings() -> None:
    assert [observed_every(setting) for setting in ("auto", "1", "50")] == [None, 1, 50]
