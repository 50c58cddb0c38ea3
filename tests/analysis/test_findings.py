"""Every rule of `findings` on a run in which it holds, with its place, and on one that only looks like it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.account import account_of
from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.findings import explain
from aorta.documents.explanations import Finding
from aorta.read.record import load_run
from aorta.records.schema import AuxRange, Collective, ComputeRange, Copy
from tests.analysis.builders import MS, header, metrics, step, write_manifest, write_rank

LENGTH_MS = 100.0


def found(dataset: LabelledRun) -> dict[str, Finding]:
    """Rule -> what it found, with its place."""
    entry = aggregate(dataset)
    explain(dataset, entry, account_of(dataset))
    return {each.rule: each for each in entry.findings}


def recorded(folder: Path, make: Callable[[int, int], dict[str, Any]], *, manifest: Any = None, **head: Any) -> Any:
    """What is found in two ranks of twelve steps, made by rank and number."""
    for rank in range(2):
        lines = []
        for number in range(12):
            parts = make(rank, number)
            given = parts.pop("metrics", {})
            exposed = given.get("exposed_comm_ms")  # hidden and exposed add up
            values = metrics(LENGTH_MS, 60.0, 18.0 + (2.0 if exposed is None else exposed), 18.0) | given
            lines.append(step(rank, 2, number, overlap=values, **parts))
        write_rank(folder, header(rank, 2, **{"platform": "cuda", "timer": "cuda_event"} | head), lines)
    write_manifest(folder, world_size=2, **(manifest or {}))
    return found(LabelledRun("x", load_run(folder)))


def compute(*spans: tuple[str, float, float]) -> list[ComputeRange]:
    return [ComputeRange(f"block{at}", phase, round(a * MS), round(b * MS)) for at, (phase, a, b) in enumerate(spans)]


def issued(kind: str, group: str, seq: int, issue_ms: float, start_ms: float, end_ms: float) -> Collective:
    times = (round(each * MS) for each in (issue_ms, start_ms, end_ms))
    return Collective(kind, group, seq, 1000, "float32", *times, "event")


@pytest.mark.parametrize(
    ("value", "platform", "parallel", "holds"),
    [
        ("1", "cuda", "fsdp", True),
        ("8", "cuda", "fsdp", False),
        ("1", "rocm", "fsdp", False),
        pytest.param("1", "cuda", "fsdp_tp", False, id="tensor parallelism needs it"),
        (None, "cuda", "fsdp", False),
    ],
)
def test_one_connection(tmp_path: Path, value: str | None, platform: str, parallel: str, holds: bool) -> None:
    environment = {} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    manifest = {"environment": environment, "platform": platform}
    rules = recorded(tmp_path, lambda _rank, _number: {}, manifest=manifest, platform=platform, parallel=parallel)
    assert ("one_connection" in rules) == holds
    if holds:
        assert rules["one_connection"].sentence.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share")


def fsdp(gather: str, scatter: str, issue_ms: float = 40.0, second: str = "allgather") -> Callable[[int, int], Any]:
    """A reduce-scatter of 20 ms, and 5 ms after it was issued a collective that begins when it ends, or at once."""

    def make(rank: int, number: int) -> dict[str, Any]:
        start_ms = 60.0 if gather == scatter else issue_ms
        slow = 5.0 if (rank, number) == (1, 7) else 0.0
        rows = [
            issued("reducescatter", scatter, number, 35.0, 40.0, 60.0),
            issued(second, gather, number, issue_ms - slow, start_ms, start_ms + 10.0),
        ]
        return {"collectives": rows, "metrics": {"exposed_comm_ms": 12.0}}

    return make


@pytest.mark.parametrize(
    ("make", "holds"),
    [
        pytest.param(fsdp("0", "0", 45.0), True, id="one group"),
        pytest.param(fsdp("1", "0"), False, id="a group each"),
        pytest.param(fsdp("0", "0", 60.0), False, id="issued when the other had ended"),
        pytest.param(fsdp("0", "0", 45.0, "reducescatter"), False, id="of one kind"),
        pytest.param(lambda *at: fsdp("0", "0", 45.0)(*at) | {"metrics": {"exposed_comm_ms": 0.5}}, False, id="hidden"),
    ],
)
def test_a_serialised_communicator(tmp_path: Path, make: Callable[[int, int], Any], holds: bool) -> None:
    rules = recorded(tmp_path, make)
    assert ("serialised_communicator" in rules) == holds
    if holds:
        rule = rules["serialised_communicator"]
        assert (rule.group, rule.rank, rule.step) == ("0", 1, 7)
        assert rule.sentence.startswith(
            "default group: all-gather and reduce-scatter queue behind each other for 15.4 ms a step (rank 1): one"
        )


def groups(computed: tuple[float, float], other: tuple[float, float]) -> Callable[[int, int], Any]:
    """Group 1 communicates from 70 to 80 ms; computation, and group 2, when it is told."""

    def make(_rank: int, number: int) -> dict[str, Any]:
        rows = [issued("alltoall", "1", number, 70, 70, 80), issued("allreduce", "2", number, other[0], *other)]
        return {"collectives": rows, "compute": compute(("forward", 0, 50), ("backward", *computed))}

    return make


@pytest.mark.parametrize(
    ("make", "holds"),
    [
        pytest.param(groups((85, 95), (68, 88)), True, id="beside another group, and never beside computation"),
        pytest.param(groups((72, 95), (68, 88)), False, id="hidden by computation"),
        pytest.param(groups((85, 95), (78, 98)), False, id="hardly beside it"),
    ],
)
def test_hidden_by_another_group(tmp_path: Path, make: Callable[[int, int], Any], holds: bool) -> None:
    rules = recorded(tmp_path, make)
    assert ("hidden_by_another_group" in rules) == holds
    if holds:
        rule = rules["hidden_by_another_group"]
        assert (rule.group, rule.rank, rule.step) == ("1", 1, 0)
        assert rule.sentence == (
            "rank 1: 100 % of the communication of group 1 overlaps that of group 2, "
            "and none of it overlaps computation"
        )


@pytest.mark.parametrize(("exposed", "stall", "holds"), [(20.0, 1.0, True), (20.0, 15.0, False), (5.0, 0.1, False)])
def test_exposed_but_not_blocking(tmp_path: Path, exposed: float, stall: float, holds: bool) -> None:
    values = {"exposed_comm_ms": exposed, "compute_stall_ms": stall}
    rules = recorded(
        tmp_path, lambda rank, _number: {"metrics": values | {"exposed_comm_ms": exposed + (0.5 if rank else 0)}}
    )
    assert ("exposed_not_blocking" in rules) == holds
    if holds:
        assert rules["exposed_not_blocking"].rank == 1
        assert "20.2 ms of communication a step is exposed, but computation waits for only 1 ms of it" in (
            rules["exposed_not_blocking"].sentence
        )


def idle(name: str, length_ms: float, spread: bool = False) -> Callable[[int, int], Any]:
    """Work called `name` from 50 ms on, idle time behind it; or idle time cut in two by a range."""

    def make(_rank: int, _number: int) -> dict[str, Any]:
        again = 52.0 + length_ms
        computed = compute(("forward", 0, 50), ("backward", again, LENGTH_MS))
        values = metrics(LENGTH_MS, 50 + LENGTH_MS - again, 0.0, 0.0)
        if name in ("d2h", "h2d"):
            copies = [Copy(name, 4, 50 * MS, 52 * MS)]  # type: ignore[arg-type]
            return {"metrics": values | {f"{name}_gb_per_s": 0.1}, "copies": copies, "compute": computed}
        aux = [AuxRange(name, 50 * MS, 52 * MS)]
        aux += (
            [AuxRange("clip", round((52 + length_ms / 2) * MS), round((52.1 + length_ms / 2) * MS))] if spread else []
        )
        return {"aux": aux, "compute": computed, "metrics": values}

    return make


@pytest.mark.parametrize(
    ("make", "timer", "holds"),
    [
        pytest.param(idle("loss_read", 20.0), "cuda_event", True, id="idle behind it"),
        pytest.param(idle("loss_read", 5.0), "cuda_event", False, id="for a moment"),
        pytest.param(idle("d2h", 20.0), "cuda_event", True, id="behind a copy to the host"),
        pytest.param(idle("h2d", 20.0), "cuda_event", False, id="behind a copy to the device"),
        pytest.param(idle("optimizer", 20.0), "cuda_event", False, id="behind the optimizer"),
        pytest.param(idle("loss_read", 20.0), "perf_counter", False, id="a CPU has nothing to launch"),
    ],
)
def test_idle_by_synchronisation(tmp_path: Path, make: Callable[[int, int], Any], timer: str, holds: bool) -> None:
    rules = recorded(tmp_path, make, timer=timer)
    assert ("idle_by_synchronisation" in rules) == holds
    if holds:
        sentence = rules["idle_by_synchronisation"].sentence
        assert re.match("rank 1 is idle for 20 ms a step behind (the read of the loss|a copy to the host)", sentence)


def loaded(begin_ms: float, end_ms: float, *computed: tuple[str, float, float]) -> Callable[[int, int], Any]:
    computed_ms = sum(end - begin for _, begin, end in computed)
    parts = {"aux": [AuxRange("data", round(begin_ms * MS), round(end_ms * MS))], "compute": compute(*computed)}
    return lambda _rank, _number: parts | {"metrics": metrics(LENGTH_MS, computed_ms, 0.0, 0.0)}


@pytest.mark.parametrize(("data_ms", "holds"), [(15.0, True), (5.0, False)])
def test_starved_by_data(tmp_path: Path, data_ms: float, holds: bool) -> None:
    rules = recorded(tmp_path, loaded(0, data_ms, ("forward", data_ms, 60), ("backward", 60, LENGTH_MS)))
    assert ("starved_by_data" in rules) == holds
    assert "idle_by_synchronisation" not in rules


def test_data_that_is_loaded_beside_computation_starves_nobody(tmp_path: Path) -> None:
    assert "starved_by_data" not in recorded(tmp_path, loaded(10, 30, ("forward", 0, 60)))
