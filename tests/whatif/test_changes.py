"""Changes: how they are written, what each does to a step worked out by hand, and to jobs really made so."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from aorta import whatif
from aorta.config.schema import Algorithm, EmulatedFabric
from aorta.errors import InputError
from aorta.records.schema import Gradient
from aorta.whatif.changes import FORMS, CommSpeed, NetworkChange, RankLateness, apply, parse_changes
from aorta.whatif.prediction import predict
from aorta.whatif.strategy_changes import GradientBuckets
from tests.whatif.event_loop import Network
from tests.whatif.hand_made import compute, issue, program, step_ns, wait
from tests.whatif.simulated_job import Job
from tests.whatif.simulated_record import record, truth

NETWORK = EmulatedFabric(inter_latency_us=1.0, inter_bandwidth_gb_per_s=1.0)
"""Between two ranks an all-reduce takes two messages of 1 us, and its bytes once: 3000 ns for 1000 bytes."""


def test_each_form_that_help_shows_is_understood() -> None:
    for form in FORMS.values():
        for text in form.replace("; ", ", ").split(", "):
            (change,) = parse_changes([text.split(" (")[0]])
            assert change.text == text.split(" (")[0]


def test_changes_are_read_into_what_they_mean() -> None:
    meant = {
        "comm=free": CommSpeed("comm=free", math.inf),
        "comm.kind.allgather=x2": CommSpeed("comm.kind.allgather=x2", 2, kind="allgather"),
        "comm.bytes.1e3-=x2": CommSpeed("comm.bytes.1e3-=x2", 2, least_bytes=1000),
        "comm.bytes.-2000=x2": CommSpeed("comm.bytes.-2000=x2", 2, most_bytes=2000),
        "network.algorithm=tree": NetworkChange("network.algorithm=tree", "algorithm", algorithm=Algorithm.tree),
        "rank.3.late_ms=-5": RankLateness("rank.3.late_ms=-5", 3, -5.0),
    }
    for text, change in meant.items():
        assert parse_changes([text]) == (change,)


def test_whatever_their_order_they_are_made_in_one_order() -> None:
    texts = ["comm=x2", "network.bandwidth=x2", "ranks=8", "rank.0.late_ms=1", "stragglers=none"]
    ordered = ["stragglers=none", "rank.0.late_ms=1", "ranks=8", "network.bandwidth=x2", "comm=x2"]
    assert [change.text for change in parse_changes(texts)] == ordered
    assert parse_changes(texts) == parse_changes(texts[::-1])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("bandwidth", "expected TARGET=VALUE"),
        ("network.bandwith", r"\(did you mean network.bandwidth\?\)"),
        ("network.speed=2", "there is no network.speed. Allowed: network.bandwidth=x2"),
        ("network.bandwith=x4", r"there is no network.bandwith \(did you mean network.bandwidth\?\). Allowed: network"),
        ("network.bandwidth=fast", "a factor such as x2, or GB/s such as 10"),
        ("network.bandwidth=0", "0 GB/s"),
        ("network.latency=-1", "-1 microseconds"),
        ("network.algorithm=star", "the algorithms are ring and tree"),
        ("comm=faster", "free or a factor such as x2"),
        ("comm=x0", "a factor is between 1e-06 and 1e.06, not 0"),
        ("comm=x1e-300", "between 1e-06 and 1e"),
        ("network.bandwidth=x1e-323", "between 1e-06 and 1e"),
        ("network.bandwidth=1e-300", "GB/s"),
        ("rank.0.late_ms=1e12", "at most 1e"),
        ("ranks=²", "2 to"),
        ("prefetch=²", "0 to 64"),
        (
            "rank.².late_ms=1",
            r"there is no rank.².late_ms \(did you mean rank.N.late_ms\?\). Allowed: rank.3.late_ms=5",
        ),
        pytest.param("ranks=" + "9" * 5000, "2 to", id="5000 digits"),
        ("comm=x1e999", "beyond any machine"),
        ("comm.kind.shuffle=free", "the kinds are allreduce"),
        ("comm.bytes.9-1=free", "9 bytes are more than 1"),
        ("comm.bytes.-=free", "not a range of bytes"),
        ("comm.colour.red=free", r"there is no comm.colour.red.*. Allowed: comm=free"),
        ("rank.first.late_ms=1", "rank.3.late_ms=5"),
        ("rank.1.late_ms=soon", "is not milliseconds"),
        ("stragglers=1", "only all stragglers can be taken away"),
        ("ranks=1", "2 to"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is_allowed(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as refused:
        parse_changes([text])
    assert str(refused.value).startswith(f"--set {text}: ")


STEP = [
    compute("block", 1000),
    issue(),
    compute("next", 500),
    issue("allgather", 4000, group="g", link=1),
    wait(0),
    wait(1),
]
"""3000 ns for the all-reduce; an all-gather of 4000 bytes takes one message and half of them: 3000 ns as well."""


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("comm=free", 1500),
        ("comm=x2", 1500 + 1500),
        ("comm.kind.allgather=free", 4000),
        ("comm.group.g=free", 4000),
        ("comm.bytes.2000-=free", 4000),
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
def test_a_change_of_a_step_worked_out_by_hand(text: str, ns: int) -> None:
    made, changes = program([STEP, STEP], [3000, 3000], network=NETWORK), parse_changes(text.split())
    assert step_ns(made) == 4500
    assert step_ns(apply(made, changes).program) == step_ns(apply(made, changes[::-1]).program) == ns


def test_what_a_run_does_not_have_cannot_be_changed() -> None:
    made = program([STEP, STEP], [3000, 3000], network=NETWORK)
    for text, match in (
        ("comm.kind.alltoall=free", "no such collective. It has kinds allgather, allreduce; groups 0, g"),
        ("rank.7.late_ms=1", "ranks of this run are 0 to 1"),
    ):
        with pytest.raises(InputError, match=match):
            apply(made, parse_changes([text]))
    (flag,) = apply(made, parse_changes(["rank.1.late_ms=-0.0008"])).flags
    assert "less than 0.0008 ms of own time before 1 of its collectives" in flag


def test_steps_that_last_nothing_are_refused() -> None:
    made = program([[issue(), wait(0)]] * 2, [0])
    with pytest.raises(InputError, match="last 0 ns"):
        predict(made, [])


def test_a_real_network_is_changed_by_factors_and_flagged() -> None:
    made = program([STEP, STEP], [3000, 3000])
    factor = apply(made, parse_changes(["network.bandwidth=x2"]))
    assert step_ns(factor.program) == 1500 + 1500
    assert factor.flags == ("the network is assumed to have no latency",)
    for text in ("network.bandwidth=1", "network.latency=x2", "network.algorithm=tree", "ranks=8"):
        with pytest.raises(InputError, match="network of this run was real"):
            apply(made, parse_changes([text]))


def test_a_prediction_has_an_interval_and_its_check() -> None:
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


def test_changes_that_cancel_each_other_are_not_sure() -> None:
    made = program([STEP, STEP], [3000, 3000], steps=4, network=NETWORK, between_ns=[100, 100])
    found = predict(made, parse_changes(["network.bandwidth=x2", "network.bandwidth=x0.5"]))
    assert found.job_step_ms.value == 4500 / 1e6
    # 10 % of the 1000 ns that each of the two changes.
    assert found.job_step_ms.high - found.job_step_ms.low == pytest.approx(2 * 0.1 * 2000 / 1e6)


def test_a_replay_that_misses_the_record_predicts_nothing() -> None:
    made = program([STEP, STEP], [3000, 3000], steps=2)
    for step in made.steps:
        step.recorded_ns[:] = 5000
    with pytest.raises(InputError, match=r"no prediction: the replay of the unchanged run takes .* 10.00% apart"):
        predict(made, [])


@pytest.mark.parametrize("text", ["rank.1.late_ms=1e9", "network.latency=1e12"])
def test_a_run_of_centuries_is_refused(text: str) -> None:
    made = program([STEP, STEP], [100, 100], steps=2000, network=EmulatedFabric())
    changes = [text, "ranks=1000000"] if text.startswith("network") else [text, *["rank.1.late_ms=9e8"] * 3]
    with pytest.raises(InputError, match=r"would take more than 146 years"):
        apply(made, parse_changes(changes))


MIB = 2**20
OF_STEP, OF_RATIO = 1e-2, 2e-3
BETWEEN_BUCKETS = 0.005
"""The same where buckets close between recorded ones: one step says for all when their gradients were ready."""
BY_BYTES = 0.03
"""The same for records that do not say in which part of its block's pass a gradient was ready."""
DDP = Job("ddp", ranks=2, steps=8, warmup=2)
SLOW = replace(DDP, network=Network(gb_per_s=0.05))


def sharded(strategy: str, **changes: int) -> Job:
    return replace(Job(strategy, ranks=4, steps=8, warmup=2), **changes)  # type: ignore[arg-type]


CASES = [
    ("larger buckets", DDP, replace(DDP, bucket_bytes=2 * MIB), "buckets.mb=2"),
    ("smaller buckets", DDP, replace(DDP, bucket_bytes=MIB // 4), "buckets.mb=0.25"),
    ("one bucket", SLOW, replace(SLOW, bucket_bytes=64 * MIB), "buckets.mb=64"),
    ("buckets on a slow network", SLOW, replace(SLOW, bucket_bytes=MIB // 4), "buckets.mb=0.25"),
    ("from one bucket", replace(DDP, bucket_bytes=64 * MIB), replace(DDP, bucket_bytes=MIB), "buckets.mb=1"),
    ("ddp not overlapped", DDP, replace(DDP, overlap=False), "overlap=off"),
    ("ddp not overlapped, slow", SLOW, replace(SLOW, overlap=False), "overlap=off"),
    ("ddp overlapped", replace(DDP, overlap=False), DDP, "overlap=on"),
    ("ddp overlapped in larger buckets", replace(DDP, overlap=False), replace(DDP, bucket_bytes=2 * MIB),
     "overlap=on buckets.mb=2"),
    ("the buckets that were", DDP, DDP, "buckets.mb=x1"),
    ("fsdp not overlapped", sharded("fsdp"), sharded("fsdp", prefetch=0), "overlap=off"),
    *(
        (f"{strategy}: prefetch {before} to {after}", *(sharded(strategy, prefetch=each) for each in (before, after)),
         f"prefetch={after}")
        for strategy in ("fsdp", "hsdp", "fsdp_tp")
        for before, after in ((1, 2), (1, 0), (2, 1), (0, 1))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("job", "changed", "change"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_moved_collectives(tmp_path: Path, job: Job, changed: Job, change: str) -> None:
    record(job, tmp_path / "run")
    real = truth(changed)
    found = whatif.predict(whatif.read_program(tmp_path / "run"), whatif.parse_changes(change.split()))
    assert found.launch_ms.value == pytest.approx(real.step_ms, rel=OF_STEP)
    assert found.launch_ms.low <= real.step_ms <= found.launch_ms.high
    assert found.overlap_ratio is not None
    between = changed.strategy == "ddp" and changed.bucket_bytes < job.bucket_bytes
    assert found.overlap_ratio.value == pytest.approx(real.ratio, abs=BETWEEN_BUCKETS if between else OF_RATIO)


@pytest.mark.parametrize(("job", "bucket_bytes"), [(DDP, MIB // 4), (SLOW, MIB // 4), (SLOW, MIB)])
def test_gradients_are_ready_by_their_bytes_where_the_record_does_not_say(
    tmp_path: Path, job: Job, bucket_bytes: int
) -> None:
    record(job, tmp_path / "run")
    program = whatif.read_program(tmp_path / "run")
    older = tuple(Gradient(one.block, one.bytes) for one in program.facts.gradient_order)
    assert older != program.facts.gradient_order
    program = replace(program, facts=replace(program.facts, gradient_order=older))
    found = whatif.predict(program, whatif.parse_changes([f"buckets.mb={bucket_bytes / MIB}"]))
    real = truth(replace(job, bucket_bytes=bucket_bytes))
    assert found.launch_ms.value == pytest.approx(real.step_ms, rel=OF_STEP)
    assert found.overlap_ratio is not None
    assert found.overlap_ratio.value == pytest.approx(real.ratio, abs=BY_BYTES)


def test_the_cap_of_recorded_buckets_is_not_that_of_the_first_one_alone() -> None:
    sizes = [MIB // 2] * 20
    alike, first_is_small = GradientBuckets((0, 1, 2), (8, 16, 20)), GradientBuckets((0, 1, 2), (2, 12, 20))
    assert alike.cap_bytes(sizes) == 4 * MIB
    assert first_is_small.cap_bytes(sizes) == 5 * MIB
    assert GradientBuckets((0, 1), (2, 20)).cap_bytes(sizes) == 10 * MIB  # of what is not full only the size is known


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_prefetching_that_a_run_had_changes_nothing(tmp_path: Path, prefetch: int) -> None:
    record(sharded("fsdp", prefetch=prefetch), tmp_path / "run")
    program = whatif.read_program(tmp_path / "run")
    found = whatif.predict(program, whatif.parse_changes([f"prefetch={prefetch}"]))
    assert found.job_step_ms.value == found.identity.replayed_ms
    assert found.overlap_ratio is not None
    assert found.overlap_ratio.value == found.identity.replayed_ratio
