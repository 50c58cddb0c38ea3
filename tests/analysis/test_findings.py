"""Every rule of `findings` on a run in which it holds, with its place, and on one that only looks like it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aorta.analysis.findings import uneven_steps
from aorta.records.schema import AuxRange, Collective, ComputeRange, Copy, Step
from tests.analysis.builders import MS, metrics, step
from tests.analysis.run_builders import explained_entry
from tests.analysis.run_builders import recorded as run

LENGTH_MS = 100.0


def recorded(folder: Path, make: Callable[[int, int], dict[str, Any]], *, manifest: Any = None, **head: Any) -> Any:
    """What is found in two ranks of twelve steps, made by rank and number: rule -> finding."""

    def of_rank(rank: int) -> Iterator[Step]:
        for number in range(12):
            parts = make(rank, number)
            given = parts.pop("metrics", {})
            exposed = given.get("exposed_comm_ms")  # hidden and exposed add up
            values = metrics(LENGTH_MS, 60.0, 18.0 + (2.0 if exposed is None else exposed), 18.0) | given
            yield step(rank, 2, number, overlap=values, **parts)

    head = {"platform": "cuda", "timer": "cuda_event"} | head
    entry = explained_entry(run(folder, of_rank, 2, manifest={"world_size": 2} | (manifest or {}), **head))
    return {finding.rule: finding for finding in entry.findings}


def compute(*spans: tuple[str, float, float]) -> list[ComputeRange]:
    return [ComputeRange(f"block{at}", phase, round(a * MS), round(b * MS)) for at, (phase, a, b) in enumerate(spans)]


def issued(kind: str, group: str, seq: int, issue_ms: float, start_ms: float, end_ms: float) -> Collective:
    times = (round(each * MS) for each in (issue_ms, start_ms, end_ms))
    return Collective(kind, group, seq, 1000, "float32", *times, "event")


Make = Callable[[int, int], dict[str, Any]]


def nothing(_rank: int, _number: int) -> dict[str, Any]:
    return {}


def connections(value: str, platform: str = "cuda", parallel: str = "fsdp") -> dict[str, Any]:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    manifest = {"environment": environment, "platform": platform}
    return {"manifest": manifest, "platform": platform, "parallel": parallel}


def fsdp(
    gather: str, scatter: str, issue_ms: float = 40.0, second: str = "allgather", exposed_ms: float = 12.0
) -> Make:
    """A reduce-scatter of 20 ms, and 5 ms after it was issued a collective that begins when it ends, or at once."""

    def make(rank: int, number: int) -> dict[str, Any]:
        start_ms = 60.0 if gather == scatter else issue_ms
        slow = 5.0 if (rank, number) == (1, 7) else 0.0
        rows = [
            issued("reducescatter", scatter, number, 35.0, 40.0, 60.0),
            issued(second, gather, number, issue_ms - slow, start_ms, start_ms + 10.0),
        ]
        return {"collectives": rows, "metrics": {"exposed_comm_ms": exposed_ms}}

    return make


def groups(computed: tuple[float, float], other: tuple[float, float]) -> Make:
    """Group 1 communicates from 70 to 80 ms; computation, and group 2, when it is told."""

    def make(_rank: int, number: int) -> dict[str, Any]:
        rows = [issued("alltoall", "1", number, 70, 70, 80), issued("allreduce", "2", number, other[0], *other)]
        return {"collectives": rows, "compute": compute(("forward", 0, 50), ("backward", *computed))}

    return make


def exposed(exposed_ms: float, stall_ms: float) -> Make:
    """Half a millisecond more is exposed on rank 1."""
    return lambda rank, _number: {"metrics": {"exposed_comm_ms": exposed_ms + rank / 2, "compute_stall_ms": stall_ms}}


def idle(name: str, length_ms: float) -> Make:
    """Work called `name` from 50 ms on, idle time behind it."""

    def make(_rank: int, _number: int) -> dict[str, Any]:
        again = 52.0 + length_ms
        computed = compute(("forward", 0, 50), ("backward", again, LENGTH_MS))
        values = metrics(LENGTH_MS, 50 + LENGTH_MS - again, 0.0, 0.0)
        if name in ("d2h", "h2d"):
            copies = [Copy(name, 4, 50 * MS, 52 * MS)]
            return {"metrics": values | {f"{name}_gb_per_s": 0.1}, "copies": copies, "compute": computed}
        return {"aux": [AuxRange(name, 50 * MS, 52 * MS)], "compute": computed, "metrics": values}

    return make


def loaded(begin_ms: float, end_ms: float, *computed: tuple[str, float, float]) -> Make:
    computed_ms = sum(end - begin for _, begin, end in computed)
    parts = {"aux": [AuxRange("data", round(begin_ms * MS), round(end_ms * MS))], "compute": compute(*computed)}
    return lambda _rank, _number: parts | {"metrics": metrics(LENGTH_MS, computed_ms, 0.0, 0.0)}


STARVED = loaded(0, 15.0, ("forward", 15.0, 60), ("backward", 60, LENGTH_MS))
CONNECTIONS, SERIALISED, GROUP, NOT_BLOCKING, SYNCHRONISED, DATA = (
    ("one_connection", "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share", None, None),
    (
        "serialised_communicator",
        r"default group: all-gather and reduce-scatter queue behind each other for 15.4 ms a step \(rank 1\): one",
        *("0", 7),
    ),
    (
        "hidden_by_another_group",
        "rank 1: 100 % of the communication of group 1 overlaps that of group 2, and none of it overlaps computation$",
        *("1", 0),
    ),
    (
        "exposed_not_blocking",
        ".*20.2 ms of communication a step is exposed, but computation waits for only 1 ms of it",
        *(None, None),
    ),
    (
        "idle_by_synchronisation",
        "rank 1 is idle for 20 ms a step behind (the read of the loss|a copy to the host)",
        *(None, None),
    ),
    ("starved_by_data", "", None, None),
)
"""Rules, and what each says, of which group and step."""


@pytest.mark.parametrize(
    ("rule", "make", "head", "holds"),
    [
        pytest.param(CONNECTIONS, nothing, connections("1"), True, id="one connection"),
        pytest.param(CONNECTIONS, nothing, connections("8"), False, id="eight"),
        pytest.param(CONNECTIONS, nothing, connections("1", "rocm"), False, id="one of another platform"),
        pytest.param(CONNECTIONS, nothing, connections("1", parallel="fsdp_tp"), False, id="tensors need it"),
        pytest.param(CONNECTIONS, nothing, {}, False, id="connections not told"),
        pytest.param(SERIALISED, fsdp("0", "0", 45.0), {}, True, id="one group"),
        pytest.param(SERIALISED, fsdp("1", "0"), {}, False, id="a group each"),
        pytest.param(SERIALISED, fsdp("0", "0", 60.0), {}, False, id="issued when the other had ended"),
        pytest.param(SERIALISED, fsdp("0", "0", 45.0, "reducescatter"), {}, False, id="of one kind"),
        pytest.param(SERIALISED, fsdp("0", "0", 45.0, exposed_ms=0.5), {}, False, id="hidden"),
        pytest.param(GROUP, groups((85, 95), (68, 88)), {}, True, id="beside another group, never computation"),
        pytest.param(GROUP, groups((72, 95), (68, 88)), {}, False, id="hidden by computation"),
        pytest.param(GROUP, groups((85, 95), (78, 98)), {}, False, id="hardly beside it"),
        pytest.param(NOT_BLOCKING, exposed(20.0, 1.0), {}, True, id="exposed and waited for little"),
        pytest.param(NOT_BLOCKING, exposed(20.0, 15.0), {}, False, id="waited for"),
        pytest.param(NOT_BLOCKING, exposed(5.0, 0.1), {}, False, id="hardly exposed"),
        pytest.param(SYNCHRONISED, idle("loss_read", 20.0), {}, True, id="idle behind it"),
        pytest.param(SYNCHRONISED, idle("loss_read", 5.0), {}, False, id="idle for a moment"),
        pytest.param(SYNCHRONISED, idle("d2h", 20.0), {}, True, id="behind a copy to the host"),
        pytest.param(SYNCHRONISED, idle("h2d", 20.0), {}, False, id="behind a copy to the device"),
        pytest.param(SYNCHRONISED, idle("optimizer", 20.0), {}, False, id="behind the optimizer"),
        pytest.param(
            SYNCHRONISED, idle("loss_read", 20.0), {"timer": "perf_counter"}, False, id="a CPU has nothing to launch"
        ),
        pytest.param(DATA, STARVED, {}, True, id="it waits for data"),
        pytest.param(SYNCHRONISED, STARVED, {}, False, id="which is no synchronisation"),
        pytest.param(
            DATA, loaded(0, 5.0, ("forward", 5.0, 60), ("backward", 60, LENGTH_MS)), {}, False, id="for a moment"
        ),
        pytest.param(DATA, loaded(10, 30, ("forward", 0, 60)), {}, False, id="loaded beside computation"),
    ],
)
def test_a_rule_holds_with_its_evidence_and_not_where_it_only_looks_so(tmp_path, rule, make, head, holds):
    name, said, group, number = rule
    found = recorded(tmp_path, make, **head).get(name)
    assert (found is not None) == holds
    if found is not None:
        assert re.match(said, found.sentence)
        assert found.rank == (None if rule is CONNECTIONS else 1)
        assert group is None or (found.group, found.step) == (group, number)


def test_slow_steps_name_the_rank_that_the_others_wait_for_in_them(monkeypatch):
    times_ms, steps = np.array([100.0] * 28 + [560.0, 400.0]), np.arange(30)
    monkeypatch.setattr("aorta.analysis.findings.job_step_times", lambda _dataset: (times_ms, steps, None))
    for share, rank in ((0.6, 1), (0.4, None)):
        dataset = SimpleNamespace(run=SimpleNamespace(ranks=[0, 1]))
        (found,) = uneven_steps(dataset, steps, np.outer(times_ms - 100.0, [-share, share]))
        assert (found.rank, "; in them the others wait for rank 1" in found.sentence) == (rank, rank == 1)
