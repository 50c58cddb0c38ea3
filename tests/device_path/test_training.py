"""Real trainings on a device, in virtual time: the record against the device's own timeline, to the nanosecond; what
the instrument leaves as it is, values, memory and a host that never waits; calibration windows; sampled steps;
threads; and the examples of the documentation.

Only the mathematics of blocks takes time on the computing stream, collectives take what the test sets, and the device
says when each ran: under any load of the machine the answer is the same, so nothing is retried.
"""

from __future__ import annotations

import gc
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.distributed.topology import Topology
from aorta.instrument.sampling import drawn
from aorta.records.schema import Step
from tests.device_path.trainings import compared, lengths, looped
from tests.runs import ROOT, record
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator
from tests.simulated.programs import launched, needs_device, on_devices
from tests.trained_ways import OF_EXPERTS, PIPELINES

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
PRIORITY = -3
"""Of AORTA's streams, and of no other."""
DEDICATED = ("instrument.mode=dedicated", f"instrument.stream_priority={PRIORITY}")
ARMS = {
    "off": ("instrument.mode=off",),
    "observe": ("instrument.mode=observe",),
    "dedicated": DEDICATED,
    "all dedicated": (*DEDICATED, "instrument.dedicated_async=true"),
}
SLOW_NS = 5_000_000
"""A collective really takes so long: who does not wait for one reads what was there before."""
WARM_UP, STEPS = 2, 3
STRATEGIES = {
    2: ("ddp", "fsdp1", "fsdp", "tp", "ep workload=moe", "pp", "cp workload=gpt"),
    4: ("hsdp", "fsdp_tp", "fsdp_ep workload=moe", "fsdp_pp"),
}
EVERY_ARM = [strategy for some in STRATEGIES.values() for strategy in some]
DEDICATED_ONLY = {
    2: [f"{strategy} training.gradient_accumulation=2" for strategy in ("ddp", "fsdp1", "fsdp")],
    4: ["fsdp_cp workload=gpt"],
}
CALIBRATIONS = ("off", "alone", "beside", "overtaken")
INSIDE, CALIBRATED_STEPS = range(3, 5), 8
SAMPLED = [f"parallel={name} instrument.mode={mode}" for name in ("ddp", "fsdp") for mode in ("dedicated", "observe")]
EVERY, SAMPLED_STEPS = 4, 19
OF_A_STEP = 3
"""Events: the epoch that marks are read against, the begin and the end."""
OF_A_MOVED_COLLECTIVE = 2
"""Events that order AORTA's stream behind the caller's, and the caller's behind it: nothing is timed with them."""
ITEMS, SAID = 1000, 200
"""Of each all-reduce of a thread, which nothing else has as many of; and how many it issues."""
Told = dict[str, list[dict[str, Any]]]


def every_arm(topology: Topology, device: torch.device, strategy: str) -> dict[str, Any]:
    """On a rank, one after another."""
    arms = ARMS if strategy in EVERY_ARM else ("dedicated",)
    return {arm: train((f"parallel={strategy}", *ARMS[arm]), topology, device) for arm in arms}


def train(words: tuple[str, ...], topology: Topology, device: torch.device) -> dict[str, Any]:
    """One run from the same seed."""
    gc.collect()  # what the run before left in cycles
    before_bytes = simulated.counters(device.index).live_bytes
    lengths()
    simulated.lengths(copy_h2d=(2_000, 1_000.0), copy_d2h=(3_000, 1_000.0))
    lines: list[Step] = []
    with looped(("workload.num_layers=2", *" ".join(words).split()), topology, device, lines, WARM_UP) as loop:
        simulated.real_delays(collective_ns=SLOW_NS)
        for _ in range(STEPS):
            loop.step()
        counters = simulated.counters(device.index)
        torch.accelerator.synchronize(device)
        streams = streams_of(device.index)
    simulated.real_delays(collective_ns=0)
    recorded = {
        (row.group, line.start_mono_ns + row.start_ns, line.start_mono_ns + row.end_ns)
        for line in lines[WARM_UP:]
        for row in line.collectives
    }
    kernels = simulated.timeline(device.index, kind="collective")
    return {
        "values": [(line.loss, line.grad_norm) for line in lines],
        "peak_bytes": counters.peak_bytes - before_bytes,
        "host_synchronisations": dict(counters.host_synchronisations),
        "streams": streams,
        "steps": compared(lines[WARM_UP:], device),
        "apart": sorted(recorded ^ {(row.group, row.start_ns, row.end_ns) for row in kernels}),
    }


def streams_of(device: int) -> dict[str, list[str]]:
    """Whose streams each kind of collective ran on."""
    found: dict[str, set[str]] = {}
    backend = simulated.backend_streams(device)
    for row in simulated.timeline(device, kind="collective"):
        if row.stream == 0:
            whose = "compute"
        elif row.stream in backend:
            whose = "backend"
        else:
            priority = int(simulator().stream_priority(row.device, row.stream))
            whose = "AORTA" if priority == PRIORITY else "strategy"
        found.setdefault(row.name, set()).add(whose)
    return {name: sorted(whose) for name, whose in found.items()}


@contextmanager
def own_profiler(rows: list[int]) -> Iterator[None]:
    """The caller's."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
    results = profiler.profiler and profiler.profiler.kineto_results
    rows.append(len(results.events()) if results else 0)


def host_waits() -> int:
    """How often the host has waited for the device."""
    return sum(simulated.counters().host_synchronisations.values())


def calibrated(topology: Topology, device: torch.device, name: str) -> dict[str, Any]:
    """One training; each step with the synchronisations of the host in it, and those between it and the next one."""
    lengths(launch_ns=10_000)
    lines, own_rows = list[Step](), list[int]()
    window = () if name == "off" else (f"instrument.calibration={len(INSIDE)}",)
    words = ("parallel=ddp", "training.log_interval=100", f"telemetry.warmup_steps={INSIDE[0]}", *window)
    with looped(words, topology, device, lines, warm_up=0) as loop:
        inner = loop.step_of_training.run
        inside: list[int] = []

        def counted(*given: Any) -> Any:
            before = host_waits()
            outcome = inner(*given)
            inside.append(host_waits() - before)
            return outcome

        loop.step_of_training.run = counted
        ends: list[int] = []
        with own_profiler(own_rows) if name == "beside" else nullcontext():
            for number in range(CALIBRATED_STEPS):
                with own_profiler(own_rows) if (name, number) == ("overtaken", INSIDE[1]) else nullcontext():
                    loop.step()
                ends.append(host_waits())
    return {
        "own_rows": own_rows,
        "inside": inside,
        "between": [end - sum(inside[: number + 1]) for number, end in enumerate(ends)],
        "measured_by": [line.measured_by or None for line in lines],
        "calibrations": msgspec.to_builtins(loop.calibrations),
        "weights": [float(parameter.detach().double().sum().cpu()) for parameter in loop.model.parameters()],
    }


def talking(_topology: Topology, device: torch.device, folder: str) -> None:
    """FSDP's loop beside two threads that issue all-reduces and never sleep, until they are done."""
    simulated.defaults()
    torch.manual_seed(0)
    model = nn.Sequential(*(fully_shard(nn.Linear(32, 32, device=device)) for _ in range(3)))
    fully_shard(model)
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(8, 32, device=device)

    def talk(group: dist.ProcessGroup) -> None:
        # A stream of its own: on one, collectives of two groups in other orders wait for each other for ever.
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(SAID):
                dist.all_reduce(torch.ones(ITEMS, device=device), group=group)

    threads = [threading.Thread(target=talk, args=(dist.new_group(),)) for _ in range(2)]
    with aorta.record(folder, model=model, calibration="off") as recording:
        for thread in threads:
            thread.start()
        going = torch.ones(1, device=device)
        while going.item():  # the same number of steps on every rank
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            going = torch.tensor([float(any(map(threading.Thread.is_alive, threads)))], device=device)
            dist.all_reduce(going)
            recording.step()
        for thread in threads:
            thread.join()
        recording.step()


def sampled(topology: Topology, device: torch.device, words: str) -> dict[str, Any]:
    """By step: events recorded, and the record's line. `bare`: events of a step that nothing of AORTA is part of."""
    lengths()
    lines, taken = list[Step](), list[int]()

    def events() -> int:
        return simulated.counters(device.index).events_recorded

    with looped((*words.split(), f"instrument.every={EVERY}"), topology, device, lines, warm_up=0) as loop:
        for _ in range(SAMPLED_STEPS):
            before = events()
            loop.step()
            torch.accelerator.synchronize()
            taken.append(events() - before)
        with loop.instrument.paused():
            loop.unrecorded()
            before = events()
            loop.unrecorded()
            bare = events() - before
    return {"bare": bare, "events": taken, "lines": msgspec.to_builtins(lines)}


def told_by(topology: Topology, device: torch.device, what: str, given: str) -> Any:
    """On a rank."""
    told = {"every_arm": every_arm, "calibrated": calibrated, "sampled": sampled, "talking": talking}
    return told[what](topology, device, given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Told:
    """Strategy -> of each rank, mode -> what came of it; and by the name of a calibration. One launch for two ranks and
    one for four.
    """
    found: Told = {}
    for ranks, strategies in STRATEGIES.items():
        cases = {name: ("every_arm", name) for name in (*strategies, *DEDICATED_ONLY[ranks])}
        if ranks == 2:
            cases |= {name: ("calibrated", name) for name in CALIBRATIONS} | {
                name: ("sampled", name) for name in SAMPLED
            }
            cases["talking"] = ("talking", str(folder / "threads"))
        found |= on_devices(told_by, folder, cases, ranks)
    return found


@pytest.mark.spec("D6")
@pytest.mark.parametrize("strategy", [*EVERY_ARM, *(one for some in DEDICATED_ONLY.values() for one in some)])
def test_a_record_is_the_devices_own_timeline(trained: Told, strategy: str) -> None:
    """Starts and ends of every collective, the ratio and the lengths."""
    name = strategy.split()[0]
    for arm, found in ((arm, found) for rank in trained[strategy] for arm, found in rank.items() if arm != "off"):
        assert found["apart"] == [], arm
        assert len(found["steps"]) == STEPS
        for step in found["steps"]:
            truth = step["truth"]
            assert step["complete"]
            assert step["kinds"]
            assert step["wrong"] == [], arm
            # And that is no trivial answer: sharded and replicated strategies hide a good part, and stall; tensor
            # parallelism hides nothing, and of expert parallelism only what is left of DDP's all-reduces.
            if name not in PIPELINES:
                least = 0.05 if name in OF_EXPERTS else 0.1
                assert truth["ratio"] == 0 if name == "tp" else least < truth["ratio"] < 0.95, arm
            assert truth["compute_stall_ms"] > 0
            assert truth["copy_ms"] > 0  # the batch, and the loss


@pytest.mark.spec("D7")
@pytest.mark.parametrize("strategy", EVERY_ARM)
def test_training_is_as_without_the_instrument(trained: Told, strategy: str) -> None:
    """Losses and norms of gradients bit for bit, with collectives of 5 ms: a missing wait would read poison. As much
    memory; and the host never waits for the device.
    """
    for rank in trained[strategy]:
        off = rank["off"]
        assert all(value == value for values in off["values"] for value in values if value is not None)
        for arm, found in rank.items():
            assert found["values"] == off["values"], arm
            assert found["peak_bytes"] <= 1.01 * off["peak_bytes"], arm
            assert found["host_synchronisations"] == off["host_synchronisations"], arm
        if strategy != "fsdp1":  # whose own limit of all-gathers in flight waits on the host
            assert off["host_synchronisations"] == {}


def test_docs_say_whose_streams_collectives_run_on(trained: Told) -> None:
    """Of every strategy, kind and mode; `stream_priority` reaches AORTA's streams only."""
    strategies: dict[str, dict[str, None]] = {}
    for strategy in EVERY_ARM:
        for rank in trained[strategy]:
            off, observed, moved, all_moved = (found["streams"] for found in rank.values())
            assert observed == off
            for name, before in sorted(off.items()):
                whose = (before, moved[name], all_moved[name])
                row = f"{name} | {' | '.join(map(', '.join, whose))}"
                strategies.setdefault(row, {})[f"`{strategy.split()[0]}`"] = None
    table = [
        "| strategies | collective | without AORTA, or `observe` | `dedicated` | with `dedicated_async` |",
        "|---|---|---|---|---|",
        *(f"| {', '.join(names)} | {row} |" for row, names in strategies.items()),
    ]
    assert "\n".join(table) in Path("docs/dev/devices.md").read_text(), "\n".join(table)


def test_what_threads_issue_that_never_sleep_is_recorded_to_the_last(trained: Told, folder: Path) -> None:
    assert trained["talking"] == [None] * 2
    for rank in (0, 1):
        steps = record(folder / "threads", rank).steps
        rows = [row for step in steps for row in step.collectives if row.bytes == ITEMS * 4]
        assert list(Counter(row.group for row in rows).values()) == [SAID] * 2
        assert [step.global_step for step in steps if not step.coverage.complete] == []


def test_a_calibration_measures_its_steps_by_kernels_and_changes_no_training(trained: Told) -> None:
    for off, *others in zip(*(trained[name] for name in CALIBRATIONS), strict=True):
        for other in others:
            assert other["weights"] == off["weights"]
            assert len(other["measured_by"]) == CALIBRATED_STEPS
    for rank in trained["alone"]:
        steps = range(CALIBRATED_STEPS)
        assert rank["measured_by"] == ["kernels" if number in INSIDE else None for number in steps]
        (found,) = rank["calibrations"]
        steps = (found["first_step"], found["last_step"], found["steps"], found["problem"])
        assert steps == (INSIDE[0], INSIDE[-1], len(INSIDE), None)
        assert 0 < found["ratio_by_kernels"] < found["ratio_by_marks"] - 0.02
        # Mathematics alone takes time, and the loss has none.
        shares = {block["block"]: block["kernel_share"] for block in found["blocks"]}
        assert shares.pop("loss") == 0
        assert shares
        assert all(0.5 < share < 0.8 for share in shares.values())
        assert min(found["window_step_ms"], found["other_step_ms"]) > 0


def test_the_host_waits_for_a_calibrations_profiler_between_steps_only(trained: Told) -> None:
    for alone, off in zip(trained["alone"], trained["off"], strict=True):
        assert alone["inside"] == off["inside"]
        more = [a - b for a, b in zip(alone["between"], off["between"], strict=True)]
        # Counted up to the end of each step: once it has been started, and once it has been stopped.
        before, behind = INSIDE[0] - 1, CALIBRATED_STEPS - INSIDE[-1]
        started, stopped = more[before], more[INSIDE[-1]]
        assert more == [0] * before + [started] * len(INSIDE) + [stopped] * behind
        assert 0 < started < stopped


@pytest.mark.parametrize(
    ("case", "problem"),
    [("beside", "another profiler was recording"), ("overtaken", "the caller's own profiler started meanwhile")],
)
def test_the_callers_own_profiler_comes_first(trained: Told, case: str, problem: str) -> None:
    for rank in trained[case]:
        assert rank["own_rows"] > [0]
        (found,) = rank["calibrations"]
        assert (found["steps"], found["problem"], found["ratio_by_kernels"]) == (0, problem, None)
        assert not any(rank["measured_by"])


def test_steps_that_are_passed_over_cost_the_device_their_begin_and_end(trained: Told) -> None:
    """No event is recorded in one but those, and, where collectives are moved, those that order the streams; what is
    observed is as if every step were.
    """
    is_drawn = [drawn(number, EVERY, 0) for number in range(SAMPLED_STEPS)]
    for name, rank in ((words, rank) for words in SAMPLED for rank in trained[words]):
        bare, steps = rank["bare"], msgspec.convert(rank["lines"], list[Step])
        moved = max(len(step.collectives) for step in steps) if "dedicated" in name else 0
        for step, count, observed in zip(steps, rank["events"], is_drawn, strict=True):
            if observed:
                assert step.coverage.complete
                assert step.drawn == EVERY
                assert count > bare + 2 * len(step.collectives) > bare
            else:
                assert step.coverage.reason is not None
                assert set(step.overlap) <= {"window_ms", "aorta_ms"}
                assert step.collectives == []
        # In the first ones streams and buckets are made; in virtual time the others are alike.
        settled = list(zip(steps, rank["events"], is_drawn, strict=True))[3:]
        passed_over = {count - bare for _, count, observed in settled if not observed}
        assert passed_over == {OF_A_STEP + OF_A_MOVED_COLLECTIVE * moved}, name
        lengths_ms = {
            (round(step.overlap["comm_ms"] or 0, 6), round(step.overlap["compute_ms"] or 0, 6))
            for step, _, observed in settled
            if observed
        }
        assert len(lengths_ms) == 1
        assert min(*lengths_ms.pop()) > 0
        windows_ms = [step.overlap["window_ms"] for step, _, _ in settled]
        assert windows_ms == pytest.approx([windows_ms[0]] * len(windows_ms), rel=1e-9)


@pytest.mark.parametrize("example", ["ddp", "fsdp2"])
def test_an_example_records_on_a_device(example: str, tmp_path: Path) -> None:
    launched(ROOT / f"docs/examples/{example}.py", str(tmp_path))
    ranks = json.loads((tmp_path / "run.json").read_text())["topology"]
    assert [rank["interceptor"] for rank in ranks] == ["native", "native"]
    for rank in (0, 1):
        written = record(tmp_path, rank)
        assert (written.header.platform, written.header.timer) == ("cuda", "cuda_event")
        assert written.footer is not None
        assert written.footer.device_clock is not None
        for step in written.steps:
            assert step.coverage.complete, step.coverage.reason
            assert {row.end_source for row in step.collectives} == {"event"}
            assert None not in (step.overlap["overlap_ratio"], step.overlap["compute_stall_ms"])
