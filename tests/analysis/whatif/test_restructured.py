"""Other buckets, overlap and prefetching, against jobs that really have them: collectives move, merge and part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aorta.analysis import whatif
from aorta.analysis.whatif.ddp_buckets import GradientBuckets
from aorta.records.schema import Gradient
from tests.analysis.whatif.network_law import Network
from tests.analysis.whatif.simulated_job import Job
from tests.analysis.whatif.simulated_record import record, truth

MIB = 2**20
STEP, RATIO = 1e-2, 2e-3
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
    assert found.launch_ms.value == pytest.approx(real.step_ms, rel=STEP)
    assert found.launch_ms.low <= real.step_ms <= found.launch_ms.high
    assert found.overlap_ratio is not None
    between = changed.strategy == "ddp" and changed.bucket_bytes < job.bucket_bytes
    assert found.overlap_ratio.value == pytest.approx(real.ratio, abs=BETWEEN_BUCKETS if between else RATIO)


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
    assert found.launch_ms.value == pytest.approx(real.step_ms, rel=STEP)
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
