"""A launch does not find its place in another launch in its environment."""

from __future__ import annotations

from pathlib import Path

from aorta.processes.environment import LAUNCHERS_OWN, own_environment


def test_a_launch_finds_nothing_of_the_torchrun_round_it() -> None:
    given = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    assert own_environment(given) == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}


def test_every_variable_that_torchrun_sets_for_a_place_is_known() -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent

    source = Path(local_elastic_agent.__file__).read_text()
    block = source[source.index("worker_env = {") :]
    names = {line.split('"')[1] for line in block[: block.index("}")].splitlines() if '": ' in line}
    places = {name for name in names if "RANK" in name or "WORLD" in name or "MASTER" in name or "ROLE" in name}
    assert places
    assert places <= set(LAUNCHERS_OWN)
