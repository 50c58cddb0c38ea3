"""Other buckets, overlap and prefetching, against jobs that really have them: collectives move, merge and part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aorta.analysis import whatif
from tests.analysis.whatif.network_law import Network
from tests.analysis.whatif.simulated_job import Job
from tests.analysis.whatif.simulated_record import record, truth

MIB = 2**20
STEP, RATIO = 1e-2, 2e-3
BETWEEN_BUCKETS = 0.03
"""The same where buckets close between recorded ones: when their gradients were ready is not in the record."""
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
    found = whatif.predict(whatif.read_program(tmp_path / "run"), whatif.parse_changes([change]))
    assert found.job_step_ms.value == pytest.approx(real.step_ms, rel=STEP)
    assert found.overlap_ratio is not None
    between = changed.strategy == "ddp" and changed.bucket_bytes < job.bucket_bytes
    assert found.overlap_ratio.value == pytest.approx(real.ratio, abs=BETWEEN_BUCKETS if between else RATIO)
