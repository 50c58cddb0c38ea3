"""Several gloo ranks on one card, where gloo takes device tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.device import needs_gpu
from tests.runs import HANGS_S, ROOT, environment

pytestmark = [pytest.mark.gpu, pytest.mark.dist, needs_gpu]


def test_two_ranks_on_one_card_get_right_values_in_every_mode() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "--module", "tests.gpu.program_gloo"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if "unsupported:" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.stdout.strip() == "right"
