"""What-if from Kineto traces: predictions against the simulated job really run with the change, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from aorta.analysis import whatif
from aorta.analysis.whatif.prediction import base_of, flags_of
from aorta.analysis.whatif.whatif_command import main
from aorta.errors import InputError
from tests.analysis.whatif.network_law import Network
from tests.analysis.whatif.simulated_job import MS, US, Job
from tests.analysis.whatif.simulated_record import truth
from tests.analysis.whatif.simulated_traces import COMPUTING, Clocks, Edit, Events, trace

pytestmark = pytest.mark.thorough

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "two_gloo_ranks" / "torch_profiler"
SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "samples"
PLAIN = Network(latency_us=0)
"""All of a collective's time is bandwidth, as a real network's is taken to be."""
JOBS = {
    name: Job(strategy, ranks=ranks, network=PLAIN, backend_ns=0, wake_ns=5 * US)
    for name, strategy, ranks in (
        ("ddp", "ddp", 2),
        ("fsdp", "fsdp", 4),
        ("hsdp", "hsdp", 4),
        ("tp", "tp", 2),
        ("fsdp_tp", "fsdp_tp", 4),
    )
}


class Faster(Job):
    """Computes twice as fast."""

    def length_ns(self, mean_ns: int, *of: object) -> int:
        own = super().length_ns(mean_ns, *of)
        return own if "between" in of else own // 2


def network(job: Job, factor: float) -> Job:
    return replace(job, network=replace(job.network, gb_per_s=factor * job.network.gb_per_s))


def late(job: Job) -> Job:
    return replace(job, late_rank=1, late_ns=3 * MS)


def predicted_ms(folder: Path, change: str) -> float:
    return whatif.predict(whatif.read_program(folder), whatif.parse_changes([change])).launch_ms.value


@pytest.mark.parametrize("syncs", [False, True], ids=["inferred", "recorded"])
@pytest.mark.parametrize("name", JOBS)
def test_the_replay_of_exact_traces_is_exact_and_a_changed_network_takes_what_it_really_takes(
    tmp_path: Path, name: str, syncs: bool
) -> None:
    job = JOBS[name]
    really = trace(job, tmp_path / "traces", syncs=syncs)
    program = whatif.read_program(tmp_path / "traces")
    identity = base_of(program).identity
    assert identity.recorded_ms == identity.replayed_ms == pytest.approx(really.step_ms, rel=1e-9)
    assert identity.replayed_ratio == identity.recorded_ratio
    assert identity.replayed_exposed_ms == identity.recorded_exposed_ms
    assert any("waits were inferred" in flag for flag in flags_of(program)) != syncs
    assert "the network was real" in " ".join(flags_of(program))
    wanted = truth(network(job, 2)).step_ms
    assert wanted < 0.95 * really.step_ms
    assert predicted_ms(tmp_path / "traces", "network.bandwidth=x2") == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("syncs", [False, True], ids=["inferred", "recorded"])
@pytest.mark.parametrize("name", JOBS)
def test_without_its_straggler_a_job_takes_what_it_really_takes(tmp_path: Path, name: str, syncs: bool) -> None:
    job = JOBS[name]
    with_it = trace(late(job), tmp_path / "traces", syncs=syncs)
    wanted = truth(job).step_ms
    assert wanted < 0.95 * with_it.step_ms
    assert predicted_ms(tmp_path / "traces", "rank.1.late_ms=-3") == pytest.approx(wanted, rel=0.01)


def test_ranks_that_are_alike_need_not_be_named(tmp_path: Path) -> None:
    job = replace(JOBS["fsdp"], skew=0.0, spread=0.0)
    trace(late(job), tmp_path / "traces", syncs=True)
    assert predicted_ms(tmp_path / "traces", "stragglers=none") == pytest.approx(truth(job).step_ms, rel=0.01)


@pytest.mark.parametrize("syncs", [False, True], ids=["inferred", "recorded"])
@pytest.mark.parametrize("name", JOBS)
def test_waits_that_took_no_time_are_missed_only_where_they_were_inferred(
    tmp_path: Path, name: str, syncs: bool
) -> None:
    job = JOBS[name]
    trace(job, tmp_path / "traces", syncs=syncs)
    faster = Faster(**{field.name: getattr(job, field.name) for field in fields(job)})
    for change, really in (("comm=x0.5", network(job, 0.5)), ("rank.1.late_ms=3", late(job)), ("compute=x2", faster)):
        wanted = truth(really).step_ms
        assert predicted_ms(tmp_path / "traces", change) == pytest.approx(wanted, rel=0.002 if syncs else 0.02), change


def ahead(rank: int, events: Events) -> Events:
    """Rank 1's host marks its steps 30 ms before its device comes to them."""
    for event in events:
        if rank == 1 and event["name"].startswith("ProfilerStep"):
            event["ts"] -= 30_000
    return events


@pytest.mark.parametrize("syncs", [False, True], ids=["inferred", "recorded"])
def test_steps_hold_the_same_collectives_however_far_a_host_is_ahead(tmp_path: Path, syncs: bool) -> None:
    job = replace(JOBS["fsdp"], steps=12)
    trace(job, tmp_path / "traces", syncs=syncs, edit=ahead)
    program = whatif.read_program(tmp_path / "traces")
    assert base_of(program).identity.residual < 0.02
    wanted = truth(network(job, 2)).step_ms
    assert predicted_ms(tmp_path / "traces", "network.bandwidth=x2") == pytest.approx(wanted, rel=0.02)


def test_clocks_of_several_hosts_are_aligned_by_the_ends_of_collectives(tmp_path: Path) -> None:
    apart = Clocks(host=lambda rank: f"node{rank}", begin_ns=lambda rank: 10**9 + rank * 777 * MS)
    job = late(JOBS["hsdp"])
    trace(job, tmp_path / "traces", clocks=apart)
    assert any(
        "clocks were aligned by the ends of" in flag for flag in whatif.read_program(tmp_path / "traces").facts.flags
    )
    assert predicted_ms(tmp_path / "traces", "rank.1.late_ms=-3") == pytest.approx(
        truth(JOBS["hsdp"]).step_ms, rel=0.01
    )


def as_devices_do(rank: int, events: Events) -> Events:
    """Kernels have 1 to 4 us between them, collectives start 2 to 6 us late and end 0 to 3 us late on each rank."""
    chance = random.Random(rank)
    for event in events:
        if "Seq" in event["args"]:
            late_us = min(chance.uniform(2, 6), event["dur"] / 2)
            event["ts"], event["dur"] = event["ts"] + late_us, event["dur"] - late_us + chance.uniform(0, 3)
        elif event["cat"] == "kernel":
            event["dur"] = max(event["dur"] - chance.uniform(1, 4), 0.5)
    return events


@pytest.mark.parametrize("syncs", [False, True], ids=["inferred", "recorded"])
@pytest.mark.parametrize("name", JOBS)
def test_the_few_microseconds_that_devices_add_change_little(tmp_path: Path, name: str, syncs: bool) -> None:
    job = JOBS[name]
    trace(job, tmp_path / "traces", syncs=syncs, edit=as_devices_do)
    assert base_of(whatif.read_program(tmp_path / "traces")).identity.residual < 0.001
    wanted = truth(network(job, 2)).step_ms
    assert predicted_ms(tmp_path / "traces", "network.bandwidth=x2") == pytest.approx(wanted, rel=0.01)


def on_the_computing_stream(_rank: int, events: Events) -> Events:
    for event in events:
        if event["cat"] == "kernel":
            event["tid"] = COMPUTING
    return events


def test_a_collective_on_the_computing_stream_is_issued_and_waited_for_in_one(tmp_path: Path) -> None:
    job = JOBS["tp"]
    trace(job, tmp_path / "traces", edit=on_the_computing_stream)
    program = whatif.read_program(tmp_path / "traces")
    assert base_of(program).identity.residual == 0
    assert predicted_ms(tmp_path / "traces", "comm=x0.5") == pytest.approx(truth(network(job, 0.5)).step_ms, rel=0.01)


def launched_before(_rank: int, events: Events) -> Events:
    """The first five collectives were launched before the recording, so that the trace does not describe them."""
    for event in [each for each in events if "Seq" in each["args"]][:5]:
        event["args"] = {"correlation": event["args"]["correlation"]}
    return events


def test_steps_with_collectives_launched_before_the_recording_are_left_out(tmp_path: Path) -> None:
    trace(JOBS["fsdp"], tmp_path / "traces", edit=launched_before)
    program = whatif.read_program(tmp_path / "traces")
    assert [step.global_step for step in program.steps] == [3, 4, 5, 6, 7]
    assert any(flag.startswith("1 step(s) hold, or come before, collectives") for flag in program.facts.flags)
    assert [step.global_step for step in whatif.read_program(tmp_path / "traces", last=2).steps] == [6, 7]


def test_queued_collectives_are_exact_where_streams_recorded_their_waits_and_flagged_where_not(tmp_path: Path) -> None:
    job = replace(JOBS["ddp"], network=replace(PLAIN, gb_per_s=0.03))
    wanted = truth(network(job, 2)).step_ms
    for syncs in (True, False):
        trace(job, tmp_path / f"{syncs}", syncs=syncs)
    assert predicted_ms(tmp_path / "True", "network.bandwidth=x2") == pytest.approx(wanted, rel=0.001)
    assert 0.85 * wanted < predicted_ms(tmp_path / "False", "network.bandwidth=x2") < wanted
    flagged = [
        any("queued behind another" in flag for flag in flags_of(whatif.read_program(tmp_path / each)))
        for each in ("True", "False")
    ]
    assert flagged == [False, True]


def slow_host_and_another_stream(_rank: int, events: Events) -> Events:
    """Every tenth kernel of the computing stream is missing, every tenth is on another one."""
    kernels = [event for event in events if event["cat"] == "kernel" and event["tid"] == COMPUTING]
    for event in kernels[5::10]:
        event["tid"] = 9
    gone = {id(event) for event in kernels[::10]}
    return [event for event in events if id(event) not in gone]


def test_idle_time_and_other_streams_are_said_and_odd_waits_are_passed_over(tmp_path: Path) -> None:
    def edit(rank: int, events: Events) -> Events:
        for number, event in enumerate(events):
            if event["cat"] == "cuda_sync" and number % 3 == 0:
                odd = ("x", -1, None, 2**70, [1])[number % 5]
                event["args"] |= {"correlation": odd, "wait_on_cuda_event_record_corr_id": odd}
        return slow_host_and_another_stream(rank, events)

    trace(JOBS["fsdp"], tmp_path / "traces", syncs=True, edit=edit)
    program = whatif.read_program(tmp_path / "traces")
    assert base_of(program).identity.residual < 0.05
    said = " ".join(program.facts.flags)
    assert "the computing stream stood idle for another reason than a collective" in said
    assert "of a rank's computation ran on other streams" in said


def without(*names: str) -> Edit:
    """Kernels without some arguments."""

    def edit(_rank: int, events: Events) -> Events:
        for event in events:
            event["args"] = {name: value for name, value in event["args"].items() if name not in names}
        return events

    return edit


def without_events(unwanted: Callable[[dict[str, Any]], bool]) -> Edit:
    return lambda _rank, events: [event for event in events if not unwanted(event)]


def slow_clock(rank: int, events: Events) -> Events:
    """Rank 1's clock is 10 % slow."""
    for event in events:
        event["ts"] *= 0.9 if rank == 1 else 1
    return events


def sent(_rank: int, events: Events) -> Events:
    for event in events:
        if "Seq" in event["args"]:
            event["args"]["Collective name"] = "send"
    return events


def numbered_alike(_rank: int, events: Events) -> Events:
    for event in events:
        if "Seq" in event["args"]:
            event["args"]["Seq"] = 7
    return events


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (without("Seq"), r"have no sequence number\. .*record_param_comms"),
        (without("Process Group Name"), "have no process group"),
        (without("Collective name"), "have no kind, no process group, no sequence number, no size"),
        (without("dtype"), "have no size"),
        (without_events(lambda event: event["name"].startswith("ProfilerStep")), r"do not mark 2 steps .*step\(\)"),
        (without_events(lambda event: event["name"].startswith("nccl")), "hold no communication"),
        (
            without_events(lambda event: event["name"] in {f"ProfilerStep#{n}" for n in range(3, 8)}),
            "do not mark 2 steps",
        ),
        (slow_clock, "clocks of the ranks cannot be compared: aligned by the ends of"),
        (sent, "sends and receives"),
        (numbered_alike, "do not have ascending sequence numbers"),
    ],
)
def test_what_a_replay_would_have_to_guess_is_refused(tmp_path: Path, edit: Edit, match: str) -> None:
    trace(JOBS["hsdp"], tmp_path / "traces", edit=edit)
    with pytest.raises(InputError, match=match):
        whatif.read_program(tmp_path / "traces")


def test_clocks_that_nothing_joins_are_refused(tmp_path: Path) -> None:
    job = replace(JOBS["hsdp"], strategy="fsdp_tp")
    only_inner = without_events(lambda event: event["args"].get("Process Group Name") == "1")
    trace(job, tmp_path / "traces", edit=only_inner, clocks=Clocks(host=lambda _rank: None))
    with pytest.raises(InputError, match=r"no collective that waits for all its ranks joins rank\(s\) 2, 3 to rank 0"):
        whatif.read_program(tmp_path / "traces")


def test_traces_of_some_ranks_are_refused(tmp_path: Path) -> None:
    trace(JOBS["fsdp"], tmp_path / "traces")
    (tmp_path / "traces" / "rank2.pt.trace.json").unlink()
    with pytest.raises(InputError, match="the traces of 1 of 4 ranks are missing"):
        whatif.read_program(tmp_path / "traces")


def test_a_step_time_that_the_graph_does_not_give_is_refused(tmp_path: Path) -> None:
    def longer(_rank: int, events: Events) -> Events:
        """Steps that overlap: each is marked as twice as long as it was."""
        for event in events:
            event["dur"] *= 2 if event["name"].startswith("ProfilerStep") else 1
        return events

    trace(JOBS["fsdp"], tmp_path / "traces", edit=longer)
    with pytest.raises(InputError, match="more than 5% is not accepted"):
        base_of(whatif.read_program(tmp_path / "traces"))


@pytest.mark.parametrize(
    "folder",
    [
        SAMPLE,
        *(
            pytest.param(
                SAMPLES / name,
                marks=pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples are not beside the checkout"),
            )
            for name in ("kineto_gloo", "rocprofv3_docs_csv", "rocprofv3_strix_csv")
        ),
    ],
    ids=lambda folder: folder.name,
)
def test_real_traces_that_cannot_be_replayed_are_refused_with_the_reason(folder: Path) -> None:
    with pytest.raises(InputError, match=r"a replay is not possible: .{20}"):
        whatif.read_program(folder)


def test_the_command_predicts_from_traces_and_says_what_they_do_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(JOBS["ddp"], tmp_path / "traces")
    folder = str(tmp_path / "traces")
    assert main([folder, "--last", "4"]) == 0
    said = capsys.readouterr().out
    assert "what would gain most:" in said
    assert "critical path of step" in said
    assert "the unchanged run" not in said
    assert "note: waits were inferred" in said
    for change, why in (
        ("buckets.mb=2", "no order of gradients"),
        ("prefetch=2", "on a device FSDP gathers on streams of its own"),
        ("overlap=off", "on a device FSDP gathers on streams of its own"),
        ("ranks=64", "the network of this run was real"),
        ("network.latency=x0.5", "the network of this run was real"),
        ("rank.9.late_ms=1", "9"),
    ):
        assert main([folder, "--set", change]) == 2
        assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("syncs", [False, True], ids=["inferred", "recorded"])
def test_a_collective_that_took_no_time_holds_nobody_up(tmp_path: Path, syncs: bool) -> None:
    def at_its_end(rank: int, events: Events) -> Events:
        """The first rank's collectives begin when they end."""
        return [
            each | {"ts": each["ts"] + each["dur"], "dur": 0} if not rank and "nccl" in each.get("name", "") else each
            for each in events
        ]

    trace(JOBS["ddp"], tmp_path / "traces", syncs=syncs, edit=at_its_end)
    program = whatif.read_program(tmp_path / "traces")
    assert program.facts.collectives
