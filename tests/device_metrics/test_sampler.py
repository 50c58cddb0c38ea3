"""The sampling thread: samples with times, failures counted and said, nothing left running (D5)."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from itertools import chain, repeat
from unittest.mock import Mock

import msgspec
import pytest

from aorta.config.schema import Devices
from aorta.device_metrics.rocm_smi import RocmSmi
from aorta.device_metrics.sampler import DeviceSampler, Opened, is_failed, open_source
from aorta.device_metrics.sources import DeviceIdentity
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import Values
from aorta.records.schema import DeviceTelemetry, Step
from tests.analysis.builders import metrics
from tests.analysis.builders import step as make_step
from tests.runs import until


def script(*acts: Values | Exception) -> Mock:
    """A source that does what the test wrote down, the last thing again and again."""
    source = Mock(min_interval_s=0.0)
    source.name = "script"
    source.read.side_effect = chain(acts, repeat(acts[-1]))
    source.settings.return_value, source.raw.return_value = {"power_cap_w": 700.0}, {}
    return source


@pytest.fixture
def step() -> Step:
    return make_step(overlap=metrics(1.0, 1.0, 0.0, 0.0))


def test_samples_carry_their_own_times_and_go_onto_one_step(step):
    source = script(Values(temp_c=40.0, throttle=[]), Values(temp_c=41.0, throttle=["power_cap"]))
    before = time.monotonic_ns()
    with DeviceSampler(Opened(source, 0.001)) as sampler:
        until(lambda: sampler.taken + sampler.failed >= 2)
        line = sampler.onto(step)
    first, second = line.device[:2]
    assert before <= first.start_mono_ns <= first.end_mono_ns <= second.start_mono_ns <= time.monotonic_ns()
    assert (first.temp_c, first.power_w, first.throttle, second.throttle) == (40.0, None, [], ["power_cap"])
    assert "device" not in line.reasons
    source.close.assert_called()
    assert not sampler._thread.is_alive()


def test_a_step_without_a_sample_is_left_as_it_is(step):
    with DeviceSampler(Opened(script(Values(temp_c=1.0)), 60.0)) as sampler:
        until(lambda: sampler.taken + sampler.failed >= 1)
        assert len(sampler.onto(step).device) == 1
        assert sampler.onto(step) is step


@pytest.mark.parametrize("error", [DeviceUnreadable("GPU is lost"), ZeroDivisionError("a bug")])
def test_a_source_that_fails_is_null_with_a_reason_counted_and_said_once(step, caplog, error):
    source = script(error, error, Values(temp_c=40.0))
    with caplog.at_level(logging.WARNING), DeviceSampler(Opened(source, 0.001)) as sampler:
        until(lambda: sampler.taken + sampler.failed >= 3)
        line = sampler.onto(step)
    assert [is_failed(sample) for sample in line.device[:3]] == [True, True, False]
    assert str(error) in line.reasons["device"]
    assert (sampler.failed, sampler.taken >= 1) == (2, True)
    first, second = (record.getMessage() for record in caplog.records)
    assert "a sample failed, and is null in the record" in first
    assert second.startswith("device telemetry: 2 of ")


@pytest.mark.parametrize(
    ("error", "words"),
    [(DeviceUnreadable("no permission"), "no permission"), (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug")],
)
def test_settings_that_cannot_be_read_do_not_stop_the_run(caplog, error, words):
    source = script(Values())
    source.settings.side_effect = error
    sampler = DeviceSampler(Opened(source, 1.0))
    assert sampler.facts()["settings"] == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"device telemetry: power caps and clock limits are not known: {words}"
    ]


def test_between_two_samples_there_is_a_pause_however_slow_the_source(monkeypatch):
    # The thread's own loop, on a clock set by hand: reading takes 3 s, the interval is 1 s.
    now, pauses, slow = [0.0], [], script(Values())
    sampler = DeviceSampler(Opened(slow, 1.0))

    def read():
        now[0] += 3.0
        return Values()

    def wait(seconds):
        pauses.append(seconds)
        now[0] += seconds
        return False

    slow.read.side_effect, sampler._stop = read, Mock(is_set=lambda: len(pauses) == 4, wait=wait)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sampler._run()
    assert pauses == [0.0, 1.0, 1.0, 1.0]


def test_what_header_and_manifest_say_and_without_a_source_there_is_no_thread(step):
    facts = {"source": "script", "interval_s": 2.0, "problem": None, "settings": {"power_cap_w": 700.0}}
    sampler = DeviceSampler(Opened(script(Values()), 2.0))
    assert (sampler.header, sampler.facts()) == (DeviceTelemetry("script", 2.0), facts)
    assert DeviceSampler(Opened()).header is DeviceSampler(Opened()).facts() is None
    with DeviceSampler(Opened(problem="no driver")) as sampler:
        assert sampler.header == DeviceTelemetry(None, None, "no driver")
        assert sampler._thread.ident is None  # it was never started
        assert sampler.onto(step) is step


def with_words(sampler: DeviceSampler, step: Step) -> Step | None:
    """The step, once there are words."""
    line = sampler.onto(step)
    return None if line.rocm_smi_t_ns is msgspec.UNSET else line


@pytest.mark.spec("D5")
def test_words_beside_another_source(program, step):
    program("rocm-smi", "echo GPU[0] words")
    with DeviceSampler(Opened(script(Values(temp_c=1.0)), 60.0), keep_words=True) as sampler:
        line = until(lambda: with_words(sampler, step))
    assert line.rocm_smi_output == "GPU[0] words\n"
    assert (line.rocm_smi_exit_code, line.rocm_smi_stderr) == (0, "")
    assert abs(line.rocm_smi_t_ns - time.time_ns()) < 60e9


@pytest.mark.spec("D5")
def test_words_of_a_program_that_is_not_there(program, step):
    with DeviceSampler(Opened(), keep_words=True) as sampler:
        assert until(lambda: with_words(sampler, step)).rocm_smi_error == "rocm-smi not available"


def test_a_program_that_hangs_does_not_hold_up_the_end(program, step):
    program("rocm-smi", """case "$*" in *--showmaxpower*) echo '{"card0": {}}' ;; *) exec sleep 1000 ;; esac""")
    source = RocmSmi(DeviceIdentity("rocm"))
    with DeviceSampler(Opened(source, 1.0)) as sampler:
        until(lambda: source._program._child is not None)
    assert not sampler._thread.is_alive()
    assert source._program._child.returncode == -9
    assert sampler.onto(step) is step  # that it was ended is no failure


# --- which source is opened

CARD = {"card0": {"GPU use (%)": "3"}}
CPU, CUDA, ROCM = DeviceIdentity("cpu"), DeviceIdentity("cuda", index=0), DeviceIdentity("rocm", index=0)


@pytest.fixture
def bare(program, monkeypatch):
    """No library, no program but those a test puts there."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    return program


@pytest.mark.parametrize(
    ("asked", "device", "problem"),
    [
        (Devices.auto, CPU, None),  # a processor is not sampled
        (Devices.off, CUDA, None),
        (Devices.auto, ROCM, r"amdsmi: cannot be used.*; rocm-smi not available"),
        (Devices.auto, CUDA, r".*pip install nvidia-ml-py.*"),
        (Devices.nvml, CPU, r".*nvidia-ml-py is not installed.*"),  # it is not replaced by another
        (Devices.auto, DeviceIdentity("other"), "no source is known for this kind of device"),
    ],
)
def test_what_is_missing_is_said_for_every_source_that_was_tried(bare, asked, device, problem):
    opened = open_source(asked, 1.0, device)
    assert opened.source is None
    assert (opened.problem is None) == (problem is None)
    assert opened.problem is None or re.fullmatch(problem, opened.problem, re.DOTALL)


def test_programs_come_last_and_seldom_unless_asked_for(bare):
    bare("rocm-smi", f"echo '{json.dumps(CARD)}'")
    unasked, asked = open_source(Devices.auto, 0.2, ROCM), open_source(Devices["rocm-smi"], 0.2, ROCM)
    assert unasked.source.name == "rocm-smi"
    assert (unasked.interval_s, asked.interval_s) == (5.0, 1.0)
    assert open_source(Devices.auto, 30.0, ROCM).interval_s == 30.0


@pytest.mark.spec("D27")
def test_rocm_smi_that_is_forced_is_the_source_so_that_it_is_read_too(bare):
    missing = open_source(Devices.auto, 0.2, CPU, keep_words=True, forced=True)
    assert (missing.source, missing.problem) == (None, "rocm-smi not available")
    bare("rocm-smi", f"echo '{json.dumps(CARD)}'")
    forced = open_source(Devices.auto, 0.2, CPU, keep_words=True, forced=True)
    assert (forced.source.name, forced.interval_s) == ("rocm-smi", 1.0)
