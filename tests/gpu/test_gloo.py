"""Several gloo ranks on one card, where gloo takes device tensors."""

from __future__ import annotations

import pytest

from tests.gpu.device import needs_gpu
from tests.runs import HANGS_S, finished, succeeded, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.dist, needs_gpu]


def test_two_ranks_on_one_card_get_right_values_in_every_mode() -> None:
    said = succeeded(finished(torchrun(2, "-m", "tests.gpu.program_gloo"), HANGS_S)).stdout.strip()
    if said.startswith("unsupported:"):
        pytest.skip(said)
    assert said == "right"
