"""The check that users run, on one device, with a model so small that no time can be judged; and isolated baselines."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from aorta.distributed.topology import read_topology
from aorta.gpu_check import check_ranks
from aorta.gpu_check.check_table import CheckReport, CheckVerdict
from aorta.recording.isolated_baselines import run_baselines
from aorta.records.schema import Step
from tests.gpu.device import needs_gpu
from tests.loop import Loop
from tests.simulated import load

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    # FSDP warns that the scorer returns a view; nothing is written into it.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    # torch 2.13 renamed these functions, and says so; 2.11 knows the old names only.
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]
SMALL = (
    "training.mixed_precision=none",
    "training.batch_size=2",
    "dataset.sequence_length=16",
    "dataset.num_samples=1024",
    "workload.model_dim=64",
    "workload.num_heads=2",
    "workload.num_layers=2",
    "workload.mlp_hidden_dim=64",
    "workload.vocab_size=100",
)


def test_the_whole_table_of_one_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(check_ranks, "BLOCK", 2)
    report = check_ranks.main(tmp_path / "check.json", ["ddp", "fsdp"], SMALL, pairs=1)
    assert report is not None
    assert msgspec.json.decode((tmp_path / "check.json").read_bytes(), type=CheckReport) == report
    (rows,) = report.rows
    failed = [row for row in rows if row.verdict is CheckVerdict.FAILED]
    assert failed == []
    assert {row.case for row in rows} == {"knobs", "race", "ddp", "fsdp"} - ({"knobs"} if torch.version.hip else set())
    assert all(row.verdict is CheckVerdict.OK for row in rows if row.case == "race")
    lengths = "communication, telemetry / kernels"  # copies stand in for what NCCL writes
    assert {row.verdict for row in rows if row.what == lengths} == {CheckVerdict.NOT_JUDGED}
    times = {row.what: row.verdict for row in rows if row.is_time and row.what != lengths}
    if load.loaded():  # in virtual time no host is slow: everything may be said
        assert set(times.values()) == {CheckVerdict.OK}
        assert report.exit_code == 0
    else:  # the host sets the pace of so small a model, so nothing may be said of its times
        assert {row.verdict for row in rows if row.is_time} == {CheckVerdict.NOT_JUDGED}
        assert report.exit_code == 4
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"(exit code {report.exit_code})")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_isolated_baselines_leave_training_as_it_was(device: torch.device, strategy: str) -> None:
    lines: list[Step] = []
    words = ("training.device=cuda", "training.log_interval=1", *SMALL, f"parallel={strategy}")
    one = Loop((*words, "instrument.mode=dedicated"), read_topology(), device, lines.append)
    for _ in range(3):
        one.step()
    parts = [getattr(p, "_local_tensor", p).detach() for p in one.model.parameters()]
    before = [part.clone() for part in parts]
    run_baselines(one.step_of_training, one.batches, lambda: True, steps=4, warmup=1)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))
    one.finish()
    compute = [line for line in lines if line.phase == "compute_only"]
    comm = [line for line in lines if line.phase == "comm_only"]
    assert len(compute) == 4
    assert all(line.coverage.complete and line.coverage.issued == 0 for line in compute)
    wanted = sorted((row.kind, row.bytes) for row in lines[2].collectives)
    assert len(comm) == (4 if wanted else 0)  # FSDP2 exchanges nothing with itself
    assert all(sorted((row.kind, row.bytes) for row in line.collectives) == wanted for line in comm)
