"""What the tests compose themselves, once for each choice of options, is what Hydra composes of the same words."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from aorta.config import CONFIG_DIR
from aorta.config.schema import register
from tests.composed import composed


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("training.max_steps=3", "parallel=fsdp", "parallel.reshard_after_forward=false", "training.max_steps=5"),
        ("experiment=full", "parallel=ddp", "training.max_steps=null", "optimizer.betas=[0.9,0.95]", "label='a=b c'"),
        ("profiling=composer", "profiling.enabled=true", "fabric=emulated", "workload=moe"),
    ],
)
def test_words_make_what_hydra_makes_of_them(words: tuple[str, ...]) -> None:
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        expected = compose("default", list(words))
    assert composed("training.max_steps=7") != expected
    assert OmegaConf.to_container(composed(*words)) == OmegaConf.to_container(expected)
