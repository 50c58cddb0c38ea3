"""Changes: how they are written, and what each does to a step worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aorta.config.schema import EmulatedFabric
from aorta.errors import InputError
from aorta.whatif.changes import FORMS, apply, parse_changes
from aorta.whatif.prediction import predict
from tests.whatif.hand_made import Compute, Wait, issue, program, step_ns

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

NETWORK = EmulatedFabric(inter_latency_us=1.0, inter_bandwidth_gb_per_s=1.0)
"""Between two ranks an all-reduce takes two messages of 1 us, and its bytes once: 3000 ns for 1000 bytes."""


def test_each_form_that_help_shows_is_understood():
    for form in FORMS.values():
        for text in form.replace("; ", ", ").split(", "):
            (change,) = parse_changes([text.split(" (")[0]])
            assert change.text == text.split(" (")[0]


@pytest.mark.parametrize(
    ("text", "match"), [*CASES["refused"], pytest.param("ranks=" + "9" * 5000, "2 to", id="5000 digits")]
)
def test_what_is_not_understood_is_refused_with_what_is_allowed(text, match):
    with pytest.raises(InputError, match=match) as refused:
        parse_changes([text])
    assert str(refused.value).startswith(f"--set {text}: ")


STEP = [Compute(1000), issue(), Compute(500), issue("allgather", 4000, group="g", link=1), Wait(0), Wait(1)]
"""3000 ns for the all-reduce; an all-gather of 4000 bytes takes one message and half of them: 3000 ns as well."""


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("comm=free", 1500),
        ("comm=x2", 1500 + 1500),
        ("comm.kind.allgather=free", 4000),
        ("comm.group.g=free", 4000),
        ("comm.bytes.2000-=free", 4000),
        ("comm.bytes.-2e3=x0.5", 1000 + 6000),
        ("network.bandwidth=x2", 1500 + 2000),  # one message, 2000 bytes at 2 bytes a ns
        ("network.bandwidth=4", 1000 + 2250),  # the all-reduce is the last: 2000 + 250
        ("network.latency=0", 1500 + 2000),
        ("network.latency=x2", 1000 + 5000),  # the all-reduce: 4000 + 1000
        ("network.algorithm=tree", 4500),  # the same between two ranks
        ("ranks=4", 1000 + 7500),  # the all-reduce: six messages, its bytes 1.5 times
        ("rank.1.late_ms=0.0005", 4500 + 1000),  # 500 ns later to both
        ("comm=x3 network.latency=0", 1500 + 667),
    ],
)
def test_a_change_of_a_step_worked_out_by_hand(text, ns):
    made, changes = program([STEP, STEP], [3000, 3000], network=NETWORK), parse_changes(text.split())
    assert step_ns(made) == 4500
    assert step_ns(apply(made, changes).program) == step_ns(apply(made, changes[::-1]).program) == ns


def test_what_a_run_does_not_have_cannot_be_changed():
    made = program([STEP, STEP], [3000, 3000], network=NETWORK)
    for text, match in (
        ("comm.kind.alltoall=free", "no such collective. It has kinds allgather, allreduce; groups 0, g"),
        ("rank.7.late_ms=1", "ranks of this run are 0 to 1"),
    ):
        with pytest.raises(InputError, match=match):
            apply(made, parse_changes([text]))
    (note,) = apply(made, parse_changes(["rank.1.late_ms=-0.0008"])).notes
    assert "less than 0.0008 ms of own time before 1 of its collectives" in note


def test_steps_that_last_nothing_are_refused():
    made = program([[issue(), Wait(0)]] * 2, [0])
    with pytest.raises(InputError, match="last 0 ns"):
        predict(made, [])


def test_a_real_network_is_changed_by_factors_and_flagged():
    made = program([STEP, STEP], [3000, 3000])
    factor = apply(made, parse_changes(["network.bandwidth=x2"]))
    assert step_ns(factor.program) == 1500 + 1500
    assert factor.notes == ("the network is assumed to have no latency",)
    for text in ("network.bandwidth=1", "network.latency=x2", "network.algorithm=tree", "ranks=8"):
        with pytest.raises(InputError, match="network of this run was real"):
            apply(made, parse_changes([text]))


def test_a_prediction_has_an_interval_and_its_check():
    made = program([STEP, STEP], [3000, 3000], steps=4, network=NETWORK, between_ns=[100, 100])
    found = predict(made, parse_changes(["network.latency=0"]))
    assert found.gain_ms.value == 1000 / 1e6
    assert found.job_step_ms.value == pytest.approx(3500 / 1e6)
    assert found.job_step_ms.low < 3500 / 1e6 < found.job_step_ms.high  # the stated error of the model
    assert found.identity.residual == 0
    assert found.overlap_ratio is not None
    assert found.overlap_ratio.value == pytest.approx(500 / 2500)  # 1000 to 3500 communicates, 1000 to 1500 computes
    unchanged = predict(made, [])
    assert unchanged.job_step_ms.low == unchanged.job_step_ms.high == 4500 / 1e6


def test_changes_that_cancel_each_other_are_not_sure():
    made = program([STEP, STEP], [3000, 3000], steps=4, network=NETWORK, between_ns=[100, 100])
    found = predict(made, parse_changes(["network.bandwidth=x2", "network.bandwidth=x0.5"]))
    assert found.job_step_ms.value == 4500 / 1e6
    # 10 % of the 1000 ns that each of the two changes.
    assert found.job_step_ms.high - found.job_step_ms.low == pytest.approx(2 * 0.1 * 2000 / 1e6)


def test_a_replay_that_misses_the_record_predicts_nothing():
    made = program([STEP, STEP], [3000, 3000], steps=2)
    made.recorded_ns[:] = 5000
    with pytest.raises(InputError, match=r"no prediction: the replay of the unchanged run takes .* 10.00% apart"):
        predict(made, [])


@pytest.mark.parametrize("text", ["rank.1.late_ms=1e9", "network.latency=1e12"])
def test_a_run_of_centuries_is_refused(text):
    made = program([STEP, STEP], [100, 100], steps=2000, network=EmulatedFabric())
    changes = [text, "ranks=1000000"] if text.startswith("network") else [text, *["rank.1.late_ms=9e8"] * 3]
    with pytest.raises(InputError, match=r"would take more than 146 years"):
        apply(made, parse_changes(changes))
