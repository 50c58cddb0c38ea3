"""Which source is opened: the best one, the one asked for, or none with the reason."""

from __future__ import annotations

import json
import sys

import pytest

from aorta.config.schema import Devices
from aorta.device_metrics.device_identity import DeviceIdentity
from aorta.device_metrics.sampler import open_source

CARD = {"card0": {"GPU use (%)": "3"}}
CPU, CUDA, ROCM = DeviceIdentity("cpu"), DeviceIdentity("cuda", index=0), DeviceIdentity("rocm", index=0)


@pytest.fixture
def bare(program, monkeypatch):
    """No library, no program but those a test puts there."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    return program


def test_a_processor_needs_nothing(bare):
    opened = open_source(Devices.auto, 0.5, CPU)
    assert opened.source is not None
    assert (opened.source.name, opened.interval_s, opened.problem) == ("psutil", 0.5, None)


def test_off_is_no_problem(bare):
    opened = open_source(Devices.off, 1.0, CUDA)
    assert (opened.source, opened.interval_s, opened.problem) == (None, None, None)


def test_what_is_missing_is_said_for_every_source_that_was_tried(bare):
    opened = open_source(Devices.auto, 1.0, ROCM)
    assert opened.source is None
    assert opened.problem is not None
    assert opened.problem.startswith("amdsmi: cannot be used")
    assert opened.problem.endswith("; amd-smi not available; rocm-smi not available")
    assert "pip install nvidia-ml-py" in str(open_source(Devices.auto, 1.0, CUDA).problem)


def test_programs_come_last_and_seldom_unless_asked_for(bare):
    bare("rocm-smi", f"echo '{json.dumps(CARD)}'")
    unasked, asked = open_source(Devices.auto, 0.2, ROCM), open_source(Devices["rocm-smi"], 0.2, ROCM)
    assert unasked.source is not None
    assert unasked.source.name == "rocm-smi"
    assert (unasked.interval_s, asked.interval_s) == (5.0, 1.0)
    assert open_source(Devices.auto, 30.0, ROCM).interval_s == 30.0


def test_a_source_asked_for_is_not_replaced_by_another(bare):
    opened = open_source(Devices.nvml, 1.0, CPU)
    assert opened.source is None
    assert "nvidia-ml-py is not installed" in str(opened.problem)


def test_an_accelerator_that_no_source_knows_is_told_so(bare):
    opened = open_source(Devices.auto, 1.0, DeviceIdentity("other"))
    assert (opened.source, opened.problem) == (None, "no source is known for this kind of device")


@pytest.mark.spec("D27")
def test_rocm_smi_that_is_forced_is_the_source_so_that_it_is_read_too(bare):
    assert open_source(Devices.auto, 0.2, CPU, keep_words=True, forced=True).source.name == "psutil"  # it is missing
    bare("rocm-smi", f"echo '{json.dumps(CARD)}'")
    forced = open_source(Devices.auto, 0.2, CPU, keep_words=True, forced=True)
    assert (forced.source.name, forced.interval_s) == ("rocm-smi", 1.0)
    assert open_source(Devices.psutil, 0.2, CPU, keep_words=True, forced=True).source.name == "psutil"
