"""`hydra/sweeper=optuna`: what may vary, what is proposed, what is told; once with real runs on an emulated fabric."""

from __future__ import annotations

import math
import sys

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from aorta.errors import ConfigError
from aorta.experiments import optuna_sweeper
from aorta.train_command import compose as main
from tests.config.conftest import ROOT

pytestmark = pytest.mark.thorough

optuna = pytest.importorskip("optuna")
KEY = "parallel.bucket_cap_mb"


class Landscape:
    """In place of runs: the result of a job is a function of its bucket size. Bad points fail."""

    def __init__(self, height, failing=lambda size: False):
        self.height, self.failing, self.sizes, self.batches = height, failing, [], []

    def __call__(self, options):
        optuna_sweeper.register()
        return self

    def launch(self, batch):
        (job,) = batch.jobs
        self.batches.append(batch)
        self.sizes.append(job.resolved.config.parallel.bucket_cap_mb)
        return [math.nan if self.failing(self.sizes[-1]) else self.height(self.sizes[-1])]

    def finish(self):
        return 0


def optimize(landscape, monkeypatch, *words):
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "hydra/sweeper=optuna", *words])
    return main(lambda resolved: pytest.fail("no run here"), ROOT / "config", landscape)


def results(tmp_path):
    return yaml.safe_load((tmp_path / "artifacts" / "sweep" / "optimization_results.yaml").read_text())


def bowl(size):
    return (math.log2(size) - 1) ** 2  # lowest at 2


@pytest.mark.parametrize(
    ("metric", "height"), [("job_step_ms", bowl), ("overlap_ratio", lambda size: -bowl(size))], ids=["lower", "higher"]
)
def test_the_better_direction_of_the_metric_is_looked_for(door, monkeypatch, tmp_path, metric, height):
    landscape = Landscape(height)
    words = (f"{KEY}=tag(log,interval(0.1,25))", f"hydra.launcher.metric={metric}", "hydra.sweeper.n_trials=30")
    assert optimize(landscape, monkeypatch, *words) == 0
    assert len(landscape.sizes) == 30
    assert all(0.1 <= size <= 25 for size in landscape.sizes)
    found = results(tmp_path)
    assert found["best_value"] == height(found["best_params"][KEY])
    assert found["best_params"][KEY] == pytest.approx(2, rel=0.25)
    # It learns: the second half lies closer to the optimum than the first, which explores.
    first, second = (sorted(map(bowl, part))[7] for part in (landscape.sizes[:15], landscape.sizes[15:]))
    assert second < first


def test_the_same_results_lead_to_the_same_proposals(door, monkeypatch):
    runs = []
    few = ("hydra.sweeper.n_trials=12",)  # the first ten are drawn, the others learnt
    for seed in (1, 1, 2):
        landscape = Landscape(bowl)
        optimize(landscape, monkeypatch, f"{KEY}=interval(1,25)", f"hydra.sweeper.seed={seed}", *few)
        runs.append(landscape.sizes)
    assert runs[0] == runs[1] != runs[2]
    assert len(runs[0]) == 12


def test_a_failed_job_is_a_failed_trial_and_no_result(door, monkeypatch, tmp_path):
    landscape = Landscape(bowl, failing=lambda size: size < 4)
    words = (f"{KEY}=1,2,4,8", "hydra.launcher.metric=job_step_ms", "hydra.sweeper.n_trials=12")
    assert optimize(landscape, monkeypatch, *words) == 0
    found = results(tmp_path)
    assert (found["best_params"], found["best_value"]) == ({KEY: "4"}, 1.0)
    assert found["trials"] == 12
    assert found["trials_failed"] == sum(size < 4 for size in landscape.sizes) > 0


def test_nothing_but_failures_has_no_best(door, monkeypatch, tmp_path):
    optimize(Landscape(bowl, failing=lambda size: True), monkeypatch, f"{KEY}=1,2", "hydra.sweeper.n_trials=3")
    assert (results(tmp_path)["best_params"], results(tmp_path)["best_value"]) == (None, None)


def test_a_proposal_that_cannot_be_run_is_a_failed_job(door, monkeypatch):
    # The first proposal is refused before anything starts; later ones must not end the sweep.
    landscape = Landscape(lambda size: 1.0)
    landscape.launch = lambda batch: landscape.batches.append(batch) or [1.0]  # type: ignore[method-assign]
    words = ("training.max_steps=range(0,3)", "hydra.sweeper.n_trials=8", "hydra.sweeper.sampler=random")
    assert optimize(landscape, monkeypatch, *words) == 0
    jobs = [batch.jobs[0] for batch in landscape.batches]
    assert len(jobs) == 8
    assert [job.refused is not None for job in jobs] == [job.words == ("training.max_steps=0",) for job in jobs]
    assert {job.refused is None for job in jobs} == {True, False}
    assert jobs[0].refused is None  # with this seed; the first would end the sweep


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        ("k=1,2,4", {"1", "2", "4"}),
        ("k=range(1,8,3)", {"1", "4", "7"}),
        ("k=range(2,0.4,-0.5)", {"2.0", "1.5", "1.0", "0.5"}),
        ("k=int(interval(1,3))", {"1", "2", "3"}),
        ("k='a b','c,d'", {"'a b'", "'c,d'"}),
    ],
)
def test_a_space_gives_every_value_it_names_and_no_other(word, allowed):
    override = OverridesParser.create().parse_override(word)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    suggest = optuna_sweeper.suggestion(override)
    assert {suggest(study.ask()) for _ in range(60)} == allowed


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("k=interval(3,3)", "from a smaller number to a larger one"),
        ("k=tag(log,interval(0,3))", "a logarithmic interval begins above 0"),
        ("k=range(3,1)", "an empty range"),
    ],
)
def test_what_is_no_space(word, said):
    with pytest.raises(ConfigError, match=said):
        optuna_sweeper.suggestion(OverridesParser.create().parse_override(word))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("training.max_steps=3",), "nothing varies"),
        ((f"{KEY}=1,2", "hydra.sweeper.n_trials=0"), "must be at least 1"),
        ((f"{KEY}=1,2", "hydra.sweeper.sampler=best"), "must be one of tpe, random, gp"),
        ((f"{KEY}=1,2", "hydra.sweeper.direction=up"), "must be one of minimize, maximize, or null"),
        ((f"{KEY}=1,2", "hydra.launcher.metric=comm_ms"), "neither direction is good in itself"),
        ((f"{KEY}=1,2", "hydra.sweeper.storage=nosuch://x"), "hydra.sweeper.storage=nosuch://x"),
    ],
)
def test_words_that_do_not_serve(door, monkeypatch, capsys, words, said):
    landscape = Landscape(bowl)
    assert optimize(landscape, monkeypatch, *words) == 1
    assert landscape.sizes == []
    assert said in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.slow
def test_a_bucket_size_is_found_on_an_emulated_fabric(sweep, tmp_path):
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.launcher.nproc=2", f"{KEY}=0.02,0.1,1"]
    words += ["hydra.launcher.metric=job_step_ms", "fabric=emulated", "fabric.inter_bandwidth_gb_per_s=0.02"]
    done, found = sweep(*words)
    assert done.returncode == 0, done.stderr
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert best["best_value"] == min(job.ended.value for job in found.jobs)
    (lowest, *_) = (job.words for job in found.jobs if job.ended.value == best["best_value"])
    assert f"{KEY}={best['best_params'][KEY]}" in lowest
