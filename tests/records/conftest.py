"""Fixtures of this room: one plain header, and step lines numbered from 0."""

from __future__ import annotations

import pytest

from aorta.records.schema import SCHEMA_VERSION, Anchor, ClockReading, Coverage, Footer, Header, Step

CLOCK = ClockReading(1_800_000_000_000_000_001, 5, 6, 70)


@pytest.fixture
def header() -> Header:
    return Header(
        schema_version=SCHEMA_VERSION,
        run_id="20260101_000000-abc",
        label="reference",
        attempt=0,
        rank=3,
        world_size=4,
        local_rank=1,
        node_rank=1,
        host="node7",
        pid=4242,
        boot_id="b007",
        platform="cpu",
        device="cpu",
        backend="gloo",
        parallel="ddp",
        timer="perf_counter",
        instrument_mode="dedicated",
        manifest_hash="00ff",
        start_step=0,
        warmup_steps=1,
        clock=CLOCK,
    )


@pytest.fixture
def step():
    def build(number: int = 0) -> Step:
        return Step(
            rank=3,
            world_size=4,
            epoch=0,
            step=number,
            global_step=number,
            warmup=False,
            loss=None,
            lr=1e-3,
            grad_norm=None,
            start_mono_ns=number * 100,
            end_mono_ns=number * 100 + 90,
            t_start_ns=number * 100,
            t_end_ns=number * 100 + 90,
            per_stream_ms={},
            overlap={"overlap_ratio": None},
            utilization={},
            concurrency={},
            coverage=Coverage(seen=0, issued=None, complete=False, reason="the backend keeps no counter"),
            active_segments=[],
            collectives=[],
            compute=[],
            stalls=[],
            aux=[],
            reasons={"loss": "not read in this step", "overlap_ratio": "no communication in this window"},
        )

    return build


@pytest.fixture
def anchor() -> Anchor:
    return Anchor(global_step=1, clock=CLOCK)


@pytest.fixture
def footer() -> Footer:
    return Footer(reason="completed", exit_code=0, steps_written=2, clock=CLOCK)
