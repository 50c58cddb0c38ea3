"""The profile for Inductor, loaded by torch's own classes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._inductor.fx_passes.profile_guided_estimation import ProfileData, _dtype_to_nccl_str

from aorta.analysis.load.gemm_shapes import _TORCH_TYPES
from aorta.analysis.load.records import load_run
from aorta.analysis.whatif.inductor_profile import OPTION, inductor_profile, write_profile
from aorta.analysis.whatif.whatif_command import main
from aorta.errors import InputError
from aorta.records.schema import Collective
from tests.analysis.builders import collective, footer, header, metrics, step, write_manifest, write_rank
from tests.analysis.whatif.simulated_job import Job
from tests.analysis.whatif.simulated_traces import trace
from tests.runs import HANGS_S, ROOT, environment

BOTH = (0, 1)
ELEMENTS = 1_000_000 // 4


def run_folder(folder: Path, steps: Sequence[Sequence[tuple[Collective, Collective]]], warmup: int = 0) -> Path:
    """Two ranks: for each step its collectives, as each rank saw them."""
    folder.mkdir()
    for rank in BOTH:
        lines = [
            step(
                rank,
                2,
                number,
                overlap=metrics(100, 10, 10, 5),
                warmup=number < warmup,
                collectives=[each[rank] for each in rows],
            )
            for number, rows in enumerate(steps)
        ]
        write_rank(folder, header(rank, 2), lines, footer(len(lines), 2, groups={"world": [0, 1], "same": [0, 1]}))
    write_manifest(folder, world_size=2)
    return folder


def seen(lengths_ms: tuple[float, float], seq: int, **facts: object) -> tuple[Collective, Collective]:
    """One collective of both ranks, each with its own duration."""
    first, second = (collective(seq=seq, end_ms=ms, **facts) for ms in lengths_ms)  # type: ignore[arg-type]
    return first, second


def loaded(folder: Path, path: Path) -> ProfileData:
    assert main([str(folder), "--inductor-profile", str(path)]) == 0
    profile = ProfileData()
    profile.load(str(path))
    return profile


def test_torch_estimates_the_median_of_the_minima_over_ranks(tmp_path: Path) -> None:
    steps = [
        [seen((900, 800), 0)],  # warm-up
        [seen((3.5, 9), 1)],
        [seen((20, 2.25), 2)],
        [seen((7, 4.125), 3), seen((6, 8), 0, group="same", bytes=4_000_000)],
    ]
    profile = loaded(run_folder(tmp_path / "run", steps, warmup=1), tmp_path / "profile.json")
    small = profile.lookup_collective("all_reduce", BOTH, ELEMENTS, "Float")
    large = profile.lookup_collective("all_reduce", BOTH, 4 * ELEMENTS, "Float")
    assert (small, large) == ((3.5, "profile"), (6.0, "profile"))
    between = profile.lookup_collective("all_reduce", BOTH, 2 * ELEMENTS, "Float")
    assert between is not None
    assert between[0] == pytest.approx((3.5 * 6.0) ** 0.5)  # half way in log-log space
    assert profile.pg_configs == {"world": BOTH, "same": BOTH}
    assert profile.lookup_collective("all_reduce", BOTH, ELEMENTS, "Half") is None


def test_groups_of_the_same_ranks_are_one_as_torch_looks_them_up(tmp_path: Path) -> None:
    rows = [seen((1, 2), 0), seen((5, 4), 0, group="same"), seen((3, 3), 1)]
    profile = loaded(run_folder(tmp_path / "run", [rows]), tmp_path / "profile.json")
    assert profile.lookup_collective("all_reduce", BOTH, ELEMENTS, "Float") == (3.0, "profile")
    assert len(profile.collectives) == 1


@pytest.mark.parametrize(
    ("kind", "asked", "taken", "given"),
    [
        ("allreduce", "all_reduce", 1000, 1000),
        ("allgather", "all_gather_into_tensor", 500, 1000),
        ("reducescatter", "reduce_scatter_tensor", 1000, 500),
        ("alltoall", "all_to_all_single", 1000, 1000),
    ],
)
def test_elements_are_those_of_the_buffers_that_torch_asks_about(
    tmp_path: Path, kind: str, asked: str, taken: int, given: int
) -> None:
    rows = [seen((2, 1), 0, kind=kind, bytes=2000, dtype="bfloat16")]
    profile = loaded(run_folder(tmp_path / "run", [rows]), tmp_path / "profile.json")
    assert profile.lookup_collective(asked, BOTH, given, "BFloat16") == (1.0, "profile")
    only = profile.collectives[0]
    assert (only.in_nelems, only.out_nelems, only.group_size, only.pg_ranks) == (taken, given, 2, BOTH)


@pytest.mark.parametrize("name", sorted(_TORCH_TYPES))
def test_data_types_have_the_names_that_torch_asks_for(tmp_path: Path, name: str) -> None:
    run = load_run(run_folder(tmp_path / "run", [[seen((2, 1), 0, bytes=1600, dtype=name)]]))
    dtype = getattr(torch, name)
    entry = inductor_profile(run).entries[0]
    assert (entry.dtype, entry.out_elements) == (_dtype_to_nccl_str(dtype), 1600 // dtype.itemsize)


def test_what_cannot_be_said_is_left_out_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        seen((2, 1), 0),
        seen((2, 1), 1, dtype=None),
        seen((2, 1), 2, bytes=1001),
        seen((2, 1), 3, kind="reducescatter", bytes=4 * 1001),
        seen((2, 1), 4, kind="broadcast"),
        seen((2, 1), 5, kind="barrier", dtype=None, bytes=0),
        seen((2, 0), 6),
        (collective(seq=7), collective(seq=8)),
    ]
    profile = loaded(run_folder(tmp_path / "run", [rows]), tmp_path / "profile.json")
    assert len(profile.collectives) == 1
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert "left out: 1 collective(s): their data type, or its size, is not known" in said
    assert "left out: 2 collective(s): their bytes are not known, or no whole number of elements" in said
    assert "left out: 2 collective(s): Inductor's estimator is not asked for this kind" in said
    assert "left out: 1 collective(s): they took no time" in said
    assert "left out: 2 collective(s): not found exactly once on every rank" in said
    assert OPTION in said
    assert any(line.startswith(f"{OPTION} = ") for line in out.splitlines()), "a line to be copied"


def test_a_run_without_a_known_transfer_is_refused(tmp_path: Path) -> None:
    run = load_run(run_folder(tmp_path / "run", [[seen((2, 1), 0, dtype=None)]]))
    with pytest.raises(InputError, match=r"no transfer is known .*1 left out: their data type"):
        inductor_profile(run)


def test_the_file_is_one_that_torch_can_open_and_replaces_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = (
        run_folder(tmp_path / "run", [[seen((2, 1), 0)], [seen((3, 3), 1)], [seen((4, 5), 2)]]),
        tmp_path / "profile.json",
    )
    with pytest.raises(InputError, match="torch reads this profile as plain text"):
        write_profile(tmp_path / "profile.json.gz", inductor_profile(load_run(folder)), overwrite=False)
    words = [str(folder), "--inductor-profile", str(path), "--last", "2"]
    assert main(words) == 0
    assert [event["dur"] for event in json.loads(path.read_text())["traceEvents"]] == [3500.0]
    assert main(words) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert main([*words, "--overwrite", "--set", "comm=free"]) == 2
    assert "are recorded, not predicted" in capsys.readouterr().err


COMPILED = """
import sys
import torch, torch.distributed as dist
import torch._inductor.config as config
from torch._inductor.fx_passes.profile_guided_estimation import ProfileGuidedEstimator
from torch.testing._internal.distributed.fake_pg import FakeStore

asked = {}
estimate = ProfileGuidedEstimator.__call__
def noted(self, node, override_size=None):
    found = asked[str(node.target)] = estimate(self, node, override_size)
    return found
ProfileGuidedEstimator.__call__ = noted
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
group = dist.group.WORLD.group_name
def exchange(x):
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group))
with config.patch({
    "aten_distributed_optimizations.profile_guided_estimations_profile_path": sys.argv[1],
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
}):
    torch.compile(exchange)(torch.ones(250, 1000))
print(asked["_c10d_functional.all_reduce.default"])
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_inductor_reads_it_by_the_option_when_it_compiles(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [[seen((9, 3.5), 0)]])
    loaded(folder, tmp_path / "profile.json")
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, str(tmp_path / "profile.json")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3.5"]


def test_traces_of_all_ranks_will_do(tmp_path: Path) -> None:
    job = Job("ddp", backend_ns=0)
    trace(job, tmp_path / "traces")
    found = loaded(tmp_path / "traces", tmp_path / "profile.json").collectives
    assert len(found) > 1
    for one in found:
        # A ring of two: each rank passes half of the array on twice.
        charged_us = 2 * (job.network.latency_us + 4 * one.out_nelems / 2 / job.network.gb_per_s / 1000)
        assert one.duration_us == pytest.approx(charged_us, rel=0.01)
