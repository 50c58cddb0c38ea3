"""Samples joined to steps by time, and what the report says of devices; numbers worked out by hand (D5, D27)."""

from __future__ import annotations

import json
import re

import pytest

import aorta.analysis
from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.devices import devices_entry, samples_of, throttle_notes
from aorta.errors import InputError
from aorta.records.schema import DeviceSample, DeviceTelemetry
from aorta.report.page.charts import step_charts
from aorta.report.summary import write_report
from tests.analysis.builders import CLOCK, MS, header, metrics, partial, step, write_rank
from tests.device_metrics.test_rocm_smi import TEXT
from tests.report.pages import as_bokeh

pytestmark = pytest.mark.thorough

SECOND = 10**9
NVML = DeviceTelemetry("nvml", 1.0)


def sample(at_s: float, clock: float | None = None, throttle: list[str] | None = None, **more: float) -> DeviceSample:
    """A sample that took 2 ms round `at_s` seconds of the monotonic clock."""
    middle = round(at_s * SECOND)
    times = {"start_mono_ns": middle - MS, "end_mono_ns": middle + MS}
    return partial(DeviceSample, sclk_mhz=clock, throttle=throttle, **times, **more)


def steps(count: int, samples: dict[int, list[DeviceSample]], rank=0, ranks=1, warm=0, words=None, **changes):
    """Step k begins at 1 + k seconds and takes half a second; `samples`: written with which step; `words`: number of a
    step -> the rocm_smi_* fields written with it.
    """
    told = {number: {"device": taken} for number, taken in samples.items()} | (words or {})
    overlap = metrics(500.0, 300.0, 100.0, 50.0)
    return [
        step(rank, ranks, number, overlap=overlap, warmup=number < warm, **told.get(number, {}), **changes)
        for number in range(count)
    ]


def write(folder, lines, telemetry=NVML, rank=0, ranks=1):
    folder.mkdir(exist_ok=True)
    write_rank(folder, header(rank, ranks, device_telemetry=telemetry), lines)
    return folder


@pytest.mark.spec("D27")
def test_D27_a_sample_belongs_to_the_step_in_which_it_was_taken(tmp_path):
    # Written two steps late, as lines are; the third is 0.1 s behind the end of step 2.
    late = [sample(1.1, 2000.0), sample(1.4, 1000.0, power_w=300.0), sample(3.6, 1500.0)]
    frame = aorta.analysis.steps(write(tmp_path / "run", steps(5, {3: late})))
    # Step 0: mean of two. Steps 1 and 2: the nearest, 0.85 s and 0.35 s away. Step 3 (at 4.25): 0.65 s. Step 4: none.
    assert frame["device_sclk_mhz"].tolist()[:4] == [1500.0, 1000.0, 1500.0, 1500.0]
    assert frame["device_sclk_mhz"].isna().tolist() == [False, False, False, False, True]
    assert frame["device_power_w"].tolist()[:2] == [300.0, 300.0]
    assert frame["device_power_w"].isna().tolist() == [False, False, True, True, True]
    assert frame["device_temp_c"].isna().all()


@pytest.mark.spec("D27")
def test_D27_throttled_in_any_sample_of_a_step_is_throttled_and_untold_is_unknown(tmp_path):
    taken = [sample(1.1, 1.0, []), sample(1.2, 1.0, ["thermal"]), sample(2.2, 1.0, []), sample(3.2, 1.0)]
    frame = aorta.analysis.steps(write(tmp_path / "run", steps(3, {2: taken})))
    assert frame["device_throttled"].tolist()[:2] == [1.0, 0.0]
    assert frame["device_throttled"].isna().tolist() == [False, False, True]


@pytest.fixture
def report(tmp_path):
    def make(**runs):
        return write_report({name: tmp_path / name for name in runs}, tmp_path / "report", html=False)

    return make


@pytest.mark.spec("D27")
def test_D27_the_summary_and_the_health_of_a_throttled_run(tmp_path, report):
    # Step 0 is warm-up: what was sampled in it (1.2 s) does not count.
    taken = {
        2: [
            sample(1.2, 100.0, ["thermal"]),
            sample(2.1, 1980.0, [], temp_c=60.0),
            sample(2.4, 1980.0, [], temp_c=64.0),
        ],
        3: [sample(3.2, 1200.0, ["power_cap"], temp_c=71.0), sample(4.2, 1980.0, ["power_cap"], temp_c=70.0)],
    }
    write(tmp_path / "a", steps(4, taken, ranks=2, warm=1), ranks=2)
    cool = {3: [sample(2.2, 1980.0, []), sample(4.2, 1970.0, [])]}
    write(tmp_path / "a", steps(4, cool, rank=1, ranks=2, warm=1), rank=1, ranks=2)
    made = report(a=...)
    entry = made.summary["datasets"]["a"]
    devices = entry["devices"]
    assert (devices["throttled"], devices["throttled_ranks"]) == ("yes", [0])
    first, second = devices["ranks"]["0"], devices["ranks"]["1"]
    assert first["sclk_mhz"] == {"count": 4, "median": 1980.0, "min": 1200.0, "max": 1980.0}
    assert first["temp_c"] == {"count": 4, "median": 67.0, "min": 60.0, "max": 71.0}
    assert first["power_w"] is None
    assert (first["samples"], first["throttled_samples"], first["throttle_reasons"]) == (4, 2, {"power_cap": 2})
    assert (first["source"], first["interval_s"]) == ("nvml", 1.0)
    assert (second["throttled"], second["samples"]) == ("no", 2)
    words = " ".join(made.text.split())
    assert "! rank 0 THROTTLED (power_cap in 2 of 4 samples); clock 1980 MHz, at least 1200" in words
    assert "devices (nvml, 6 samples): 1978 MHz (at least 1200), 67 C, throttled: yes" in words
    assert json.loads((tmp_path / "report/summary.json").read_text())["datasets"]["a"]["devices"] == devices
    charts = step_charts({"a": LabelledRun("a", aorta.analysis.load_run(tmp_path / "a"))})
    (clock,) = (each for each in as_bokeh(charts) if each.name == "steps-device_sclk_mhz")
    marks = [each.data_source.data for each in clock.renderers if "marker" in each.data_source.data]
    assert [each["x"].tolist() for each in marks] == [[2, 3]]


@pytest.mark.parametrize(
    ("throttled", "of", "named"), [(1, 4, False), (2, 4, True), (2, 40, True), (2, 41, False), (3, 41, True)]
)
@pytest.mark.spec("D27")
def test_D27_a_passing_sample_is_no_alert(tmp_path, throttled, of, named):
    taken = [sample(1.01 + 0.01 * at, 1.0, ["thermal"] if at < throttled else []) for at in range(of)]
    run = aorta.analysis.load_run(write(tmp_path / "a", steps(2, {1: taken})))
    entry = devices_entry(run, samples_of(run))
    assert (entry.throttled, entry.throttled_ranks, len(throttle_notes(entry))) == ("yes", [0] * named, named)


@pytest.mark.parametrize(
    ("throttles", "state"),
    [([[], []], "no"), ([[], None], "no"), ([None, None], "unknown"), ([["other"], []], "yes"), (None, None)],
)
@pytest.mark.spec("D27")
def test_D27_throttled_yes_no_or_unknown_and_nothing_of_a_run_that_asked_for_nothing(
    tmp_path, report, throttles, state
):
    taken = [sample(1.1 + place, 1.0, throttle) for place, throttle in enumerate(throttles or [])]
    write(tmp_path / "a", steps(2, {1: taken} if taken else {}), telemetry=NVML if taken else None)
    made = report(a=...)
    if state is None:
        assert "device" not in made.text.replace("one process per device", "")
        frame = aorta.analysis.steps(tmp_path / "a")
        assert frame[["device_sclk_mhz", "device_throttled"]].isna().all(axis=None)
        assert aorta.analysis.device_samples(tmp_path / "a").empty
    else:
        assert made.summary["datasets"]["a"]["devices"]["throttled"] == state


def test_missing_sources_and_failures_are_said_not_hidden_and_join_nothing(tmp_path, report):
    write(tmp_path / "a", steps(2, {}), telemetry=DeviceTelemetry(None, None, "nvml: no driver"))
    lost = write(tmp_path / "b", steps(2, {1: [sample(1.4, 900.0), sample(2.2)]}, reasons={"device": "GPU is lost"}))
    frame = aorta.analysis.device_samples(lost)
    assert (frame["failed"].tolist(), frame["reason"].tolist()) == ([False, True], [None, "GPU is lost"])
    assert aorta.analysis.steps(lost)["device_sclk_mhz"].tolist() == [900.0, 900.0]
    made = report(a=..., b=...)
    words = " ".join(made.text.split())
    assert "! rank 0: no device samples: nvml: no driver" in words
    assert "! rank 0: 1 device sample failed: GPU is lost" in words
    assert made.summary["datasets"]["a"]["devices"]["throttled"] == "unknown"


def test_columns_of_devices_are_given_by_name_and_samples_of_a_baseline_count(tmp_path):
    lines = steps(2, {1: [sample(1.4, 900.0)]})
    alone = step(0, 1, 0, overlap=metrics(500.0, 300.0, 0.0, 0.0), phase="compute_only", device=[sample(2.2, 700.0)])
    run = aorta.analysis.load_run(write(tmp_path / "run", [*lines, alone]))
    frame = aorta.analysis.steps(run, ["global_step", "device_sclk_mhz"])
    assert frame.to_dict("list") == {"global_step": [0, 1], "device_sclk_mhz": [900.0, 700.0]}
    assert list(aorta.analysis.steps(run, ["loss", "send_ms"]).columns) == ["loss", "send_ms"]
    for name, hint in (("step_mss", "did you mean step_ms?"), ("wait_ms", "it is a column of aorta.analysis.coll")):
        with pytest.raises(InputError, match=re.escape(f"columns: {name!r}: steps have no such column; {hint}")):
            aorta.analysis.steps(run, ["global_step", name])


# --- what rocm-smi printed, in records that have no other samples --------------------------------------------------


def printed(at_s: float, **changes):
    """Words begun at `at_s` seconds of the monotonic clock, which the record holds in wall-clock time."""
    fields = {"rocm_smi_output": TEXT[: TEXT.index("GPU[1]")], "rocm_smi_exit_code": 0, "rocm_smi_stderr": ""}
    return {"rocm_smi_t_ns": CLOCK.realtime_ns + round(at_s * SECOND), **fields, **changes}


@pytest.mark.spec("D27")
@pytest.mark.parametrize("telemetry", [None, DeviceTelemetry(None, 1.0, "amdsmi: not installed")])
def test_D27_words_of_rocm_smi_are_parsed_and_joined(tmp_path, telemetry):
    words = {2: printed(1.3), 4: {"rocm_smi_t_ns": printed(5.1)["rocm_smi_t_ns"], "rocm_smi_error": "gone"}}
    folder = write(tmp_path / "run", steps(5, {}, words=words), telemetry)
    frame = aorta.analysis.steps(folder)
    assert frame["device_power_w"].tolist()[:2] == [139.0] * 2  # in step 0, 0.95 s from the middle of step 1
    assert frame["device_power_w"].isna().tolist() == [False, False, True, True, True]
    samples = aorta.analysis.device_samples(folder)
    assert samples["start_mono_ns"].tolist() == [1_300_000_000, 5_100_000_000]
    assert samples["reason"].tolist() == [None, "gone"]
    report = write_report({"run": folder}, tmp_path / "out", html=False)
    entry = report.summary["datasets"]["run"]["devices"]["ranks"]["0"]
    assert (entry["source"], entry["samples"], entry["samples_failed"]) == ("rocm-smi", 2, 1)
    assert (entry["power_w"]["median"], entry["sclk_mhz"]["median"], entry["problem"]) == (139.0, 132.0, None)
    beside = {1: {**printed(1.2), "device": [sample(1.1, power_w=7.0)]}}  # those of a library are not read twice
    folder = write(tmp_path / "both", steps(3, {}, words=beside))
    assert aorta.analysis.device_samples(folder)["power_w"].tolist() == [7.0]


def test_words_with_an_impossible_time_cost_their_line_and_no_other(tmp_path):
    folder = write(
        tmp_path / "run", steps(4, {}, words={1: printed(1.2, rocm_smi_t_ns=2**62 - 1), 2: printed(3.1)}), None
    )
    path = folder / "rank_0_metrics.jsonl"
    path.write_text(path.read_text().replace('"start_mono_ns":2000000000', '"start_mono_ns":4000000000000000000'))
    run = aorta.analysis.load_run(folder)
    assert any("centuries from its step" in problem for problem in run.health.problems)
    assert aorta.analysis.device_samples(run)["power_w"].tolist() == [139.0]
