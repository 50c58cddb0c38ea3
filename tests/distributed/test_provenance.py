"""The manifest: JSON, complete, and without anything from the environment that is not on the list."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from aorta import installation
from aorta.distributed import cuda
from aorta.distributed.output_folder import RequestedConfig, RunFolder, build_manifest, rank_facts, recorded_environment
from tests.distributed.conftest import place
from tests.libraries import stand_in
from tests.runs import environment as launch_environment
from tests.runs import finished, succeeded

CPU = torch.device("cpu")


@pytest.fixture
def manifest(tmp_path):
    def build(*environments, label=None):
        ranks = [rank_facts(place(rank, len(environments)), CPU) for rank in range(len(environments))]
        for facts, environment in zip(ranks, environments, strict=True):
            facts["environment"] = environment
        asked = RequestedConfig(label, {"label": label, "training": {"seed": 42}}, "00ff")
        folder = RunFolder(tmp_path, "20260101T000000Z-abcd", 2)
        return build_manifest(asked, folder, place(0, len(environments)), CPU, "gloo", ranks, {"buckets": 3})

    return build


RECORDED = (
    "NCCL_DEBUG", "RCCL_MSCCL_ENABLE", "GLOO_SOCKET_IFNAME", "HSA_ENABLE_SDMA", "CUDA_VISIBLE_DEVICES", "MSCCLPP_X",
    "LD_PRELOAD", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTORCH_HIP_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "GPU_MAX_HW_QUEUES",
)  # fmt: skip
OTHERS = ("HOME", "PATH", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_NCCL_DEBUG", "OMP_NUM_THREADS_X", "nccl_debug", "")
SECRETS = (
    "NCCL_TOKEN", "NCCL_SECRET_X", "CUDA_API_KEY", "AMD_PASSWORD", "HIP_AUTH", "NCCL_CREDENTIALS", "NCCL_my_token",
    "HIP_DB_PASS",
)  # fmt: skip


def test_what_changes_a_measurement_is_recorded_and_nothing_else_nor_what_looks_like_a_secret():
    assert recorded_environment(dict.fromkeys((*RECORDED, *OTHERS, *SECRETS), "1")) == dict.fromkeys(RECORDED, "1")


def test_the_manifest_is_json_and_holds_no_foreign_variable(manifest, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_API_KEY", "hunter3")
    text = json.dumps(manifest({"NCCL_DEBUG": "INFO"}), allow_nan=False)
    assert "hunter" not in text
    assert "hunter" not in json.dumps(rank_facts(place(), CPU))
    read = json.loads(text)
    assert read["environment"] == {"NCCL_DEBUG": "INFO"}
    assert (read["run_id"], read["attempt"], read["world_size"]) == ("20260101T000000Z-abcd", 2, 1)
    assert (read["platform"], read["backend"], read["manifest_hash"]) == ("cpu", "gloo", "00ff")
    assert read["plan"] == {"buckets": 3}
    assert (read["label"], manifest({}, label="mine")["label"]) == ("cpu", "mine")
    assert read["versions"]["torch"] == torch.__version__
    assert read["devices"] == ["cpu"]


def test_ranks_whose_environment_differs_from_rank_0_are_listed(manifest):
    same, other = {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}
    read = manifest(same, same, other)
    assert read["environment_differences"] == {"2": other}
    assert [facts["rank"] for facts in read["topology"]] == [0, 1, 2]
    assert all("environment" not in facts for facts in read["topology"])


SHOW = "import json; from aorta.distributed import cuda as c; print(json.dumps(c.loaded_library()))"


@pytest.mark.parametrize("replaced", [False, True])
def test_the_library_that_answers_for_nccl_is_recorded_with_what_tells_two_builds_apart(tmp_path, replaced):
    """One that was replaced after it was loaded has no digest."""
    file, link = stand_in(tmp_path / "one", 22703, "one"), tmp_path / "libnccl.so"
    link.symlink_to(file)
    known = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    code = f"import os, torch; os.unlink({str(file)!r}); {SHOW}" if replaced else SHOW
    done = succeeded(finished([sys.executable, "-c", code], own=launch_environment(LD_PRELOAD=str(link))))
    path = f"{file} (deleted)" if replaced else str(file)
    expected = {"path": path, "version": "2.27.3"} | (dict.fromkeys(known) if replaced else known)
    assert json.loads(done.stdout) == expected


def test_without_nccl_no_library_is_recorded(manifest, monkeypatch):
    monkeypatch.setattr(cuda, "_nccl_functions", lambda: iter(()))
    read = manifest({}, {})
    assert (read["collective_library"], read["collective_library_differences"]) == (None, {})


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)])
def test_no_git_is_no_error(manifest, monkeypatch, error):
    monkeypatch.setattr(installation.subprocess, "run", Mock(side_effect=error))
    assert manifest({})["versions"]["aorta_commit"] is None
