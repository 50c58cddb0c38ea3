"""aorta.record: what is written, what is put back, what is refused; and a process group that came from no launcher."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import aorta
from aorta.autopsy.evidence import RankExit
from aorta.autopsy.processes import exit_in_record
from aorta.distributed.clock_measurement import ClockSynchronisation
from aorta.errors import ConfigError, RunIncomplete
from aorta.read.record import load_run
from aorta.recording import api_arguments
from aorta.records.progress import progress_files, read_progress
from aorta.records.schema import Footer
from tests.runs import HANGS_S, ROOT, environment, record

X = torch.ones(2, 4)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def train(model: nn.Module, recording: aorta.Recording, steps: int, *, micro: int = 1) -> None:
    for step in range(steps):
        for _ in range(micro):
            loss = model(X).square().mean()
            loss.backward()
        recording.note(loss=loss, lr=0.5 + step)
        recording.step()


def footer(folder: Path) -> Footer:
    return record(folder).footer


@pytest.mark.spec("D4")
def test_what_is_written(tmp_path, model):
    handler = signal.getsignal(signal.SIGTERM)
    told = {"label": "mine", "workload": {"width": 4}, "parallel": "none", "warmup_steps": 1, "start_step": 7}
    with aorta.record(tmp_path, model=model, **told) as recording:
        assert signal.getsignal(signal.SIGTERM) is handler  # the caller's, or the default, which kills
        assert (recording.blocks, recording.path) == (("0", "1", "2"), tmp_path)
        train(model, recording, 3, micro=2)
        model(X).sum().backward()  # behind the last step: not recorded
    seen = record(tmp_path)
    header = seen.header
    assert (header.label, header.parallel, header.world_size, header.backend) == ("mine", "none", 1, None)
    steps = [(step.global_step, step.warmup, step.lr) for step in seen.steps]
    assert steps == [(7, True, 0.5), (8, False, 1.5), (9, False, 2.5)]
    assert all(step.loss is not None and step.coverage.complete for step in seen.steps)
    assert len(seen.steps[0].compute) == 2 * 2 * 3
    assert footer(tmp_path).reason == "completed"
    manifest = json.loads((tmp_path / "run.json").read_text())
    config = manifest["config"]
    assert (config["workload"], config["parallel"], manifest["reasons"]) == ({"width": 4}, {"strategy": "none"}, {})


@pytest.mark.spec("D4")
def test_what_is_not_told_is_null_with_a_reason_and_a_second_run_moves_the_first_to_history(tmp_path, model):
    (tmp_path / "checkpoints").mkdir()  # the caller's own
    with aorta.record(tmp_path, model=model) as recording:
        recording.step()
        model(X)
        recording.restart()  # leaves out what came before
        with recording.aux("optimizer"):
            pass
        recording.note(loss=1.5)
        recording.note(grad_norm=torch.tensor([2.0]))  # and the loss stays
        with pytest.raises(ConfigError, match="loss has 3 elements, must have one"):
            recording.note(loss=torch.ones(3))
        recording.step()
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert manifest["config"]["workload"] is manifest["config"]["parallel"] is None
    assert manifest["reasons"].keys() == {"config.workload", "config.parallel"}
    first, second = record(tmp_path).steps
    assert first.loss is first.lr is first.grad_norm is None
    assert first.reasons.keys() >= {"loss", "lr", "grad_norm"}
    assert (second.loss, second.grad_norm, second.compute) == (1.5, 2.0, [])
    assert [span.name for span in second.aux] == ["optimizer"]
    with aorta.record(tmp_path, model=model):
        pass
    (earlier,) = (tmp_path / "history").iterdir()
    assert record(earlier).header.run_id == manifest["run_id"] != record(tmp_path).header.run_id
    assert (tmp_path / "checkpoints").is_dir()


def test_optimizer_steps_are_aux_without_a_call(tmp_path, model):
    optimizer, by_closure = (kind(model.parameters(), lr=0.1) for kind in (torch.optim.SGD, torch.optim.LBFGS))

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            if closure is None and self.param_groups[0]["lr"] < 0:
                raise ValueError("below zero")
            optimizer.step()

    outer = Outer(model.parameters(), lr=1)
    with aorta.record(tmp_path, model=model, warmup_steps=0) as recording:
        outer.param_groups[0]["lr"] = -1
        with pytest.raises(ValueError, match="below zero"):
            outer.step()
        recording.restart()
        for step in (outer.step, lambda: (optimizer.step(), optimizer.step()), lambda: by_closure.step(lambda: 0.0)):
            outer.param_groups[0]["lr"] = 1
            model(X).sum().backward()
            step()
            recording.step()
    steps = record(tmp_path).steps
    assert [[span.name for span in step.aux] for step in steps] == [["optimizer"], ["optimizer"] * 2, []]
    assert all(span.end_ns <= round(step.overlap["window_ms"] * 1e6) for step in steps for span in step.aux)


@pytest.mark.parametrize(
    ("error", "reason", "code", "words"),
    [
        (ValueError("bad batch\nmore"), "error", 1, "rank 0: ValueError: bad batch"),
        (KeyboardInterrupt(), "error", 130, "rank 0: KeyboardInterrupt"),
        (SystemExit(3), "error", 3, "rank 0: SystemExit: 3"),
        (RunIncomplete("half"), "error", 1, "rank 0: RunIncomplete: half"),  # Python's exit code, not `aorta train`'s
        (SystemExit(0), "completed", 0, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_goes_on_and_is_written_down(tmp_path, model, error, reason, code, words):
    with pytest.raises(type(error)) as caught, aorta.record(tmp_path, model=model) as recording:  # noqa: PT012
        train(model, recording, 2)
        raise error
    assert caught.value is error
    end = footer(tmp_path)
    assert (end.reason, end.exit_code, end.error, end.steps_written) == (reason, code, words, 2)
    (ring,) = progress_files(tmp_path)
    assert read_progress(ring).state.exit_code == code


@pytest.mark.parametrize("error", [None, ValueError("bad batch")])
def test_a_full_disk_ends_the_record_and_not_the_job(tmp_path, model, monkeypatch, caplog, capsys, error):
    path, write = tmp_path / "rank_0_metrics.jsonl", os.write
    with nullcontext() if error is None else pytest.raises(ValueError, match="bad batch"):  # noqa: SIM117
        with aorta.record(tmp_path, model=model, watchdog_timeout_s=0) as recording:  # this process makes the lines
            train(model, recording, 5)
            recording._recorder.catch_up()
            full = path.stat()

            def refuse(file, data):
                if os.fstat(file).st_ino == full.st_ino and os.fstat(file).st_size + len(data) > full.st_size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(file, data)

            monkeypatch.setattr(os, "write", refuse)
            train(model, recording, 5)
            if error is not None:
                raise error
    kept, said = record(tmp_path), [each.message for each in caplog.records if "cannot write" in each.message]
    assert kept.problems == []
    assert 3 <= len(kept.steps) == kept.footer.steps_written < 5
    assert kept.footer.steps_lost == 10 - len(kept.steps)
    (line,) = said
    assert line.endswith(". The loop goes on unrecorded")
    assert kept.footer.error.endswith(line.removesuffix(". The loop goes on unrecorded"))
    assert (kept.footer.reason, kept.footer.exit_code) == ("error", 0 if error is None else 1)
    (ending,) = load_run(tmp_path).health.endings.values()
    if error is None:
        assert f"{len(kept.steps)} steps recorded; " in capsys.readouterr().err
        assert ending == f"recorded in part: {kept.footer.error}"
        assert exit_in_record(tmp_path, 0) == RankExit(exit_code=0)
    else:
        assert ending.startswith("ended by an error, exit code 1: rank 0: ValueError: bad batch; rank 0 cannot write")


def test_started_and_closed_without_a_block(tmp_path, model):
    recording = aorta.start(tmp_path, model=model, warmup_steps=0)
    train(model, recording, 2)
    recording.close(ValueError("bad batch"))
    recording.close()  # a callback may be told twice
    end = footer(tmp_path)
    assert (end.reason, end.error, end.steps_written) == ("error", "rank 0: ValueError: bad batch", 2)
    with aorta.record(tmp_path, model=model) as other, pytest.raises(ConfigError, match=r"`with aorta\.record.* ends"):
        other.close()


@pytest.mark.parametrize(
    ("last", "reason", "words"),
    [("", "completed", None), ("raise ValueError('bad batch')", "error", "rank 0: ValueError: bad batch")],
    ids=["the end", "an error"],
)
def test_one_that_nobody_closes_ends_with_the_program(tmp_path, last, reason, words):
    code = f"""
import aorta, os, torch
model = torch.nn.Linear(2, 2)
recording = aorta.start({str(tmp_path)!r}, model=model)
model(torch.ones(1, 2)).sum().backward()
recording.step()
if os.fork() == 0:
    raise SystemExit  # the child's end is not the recording's
os.wait()
model(torch.ones(1, 2)).sum().backward()
recording.step()
{last}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), timeout=HANGS_S, check=False)
    assert done.returncode == (0 if words is None else 1)
    end = footer(tmp_path)
    assert (end.reason, end.error, end.steps_written) == (reason, words, 2)


def test_what_goes_wrong_behind_the_footer_does_not_contradict_it(tmp_path, model, monkeypatch):
    monkeypatch.setattr(ClockSynchronisation, "at_end", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), aorta.record(tmp_path, model=model) as recording:  # noqa: PT012
        train(model, recording, 1)
        sys.exit(0)
    lines = (tmp_path / "rank_0_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("reason") for line in lines] == [None, None, "completed"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_does_not_stay_is_said_once(tmp_path, model, capfd, replaced):
    folder = tmp_path / "run"
    with aorta.record(folder, model=model) as recording:
        train(model, recording, 3)
        folder.rename(tmp_path / "old")
        if replaced:
            folder.mkdir()
        train(model, recording, 4)
    said = capfd.readouterr().err
    assert said == f"aorta: 7 steps recorded, but {folder} was removed, renamed or replaced meanwhile\n"
    assert list(tmp_path.glob("run/*")) == []


@pytest.mark.parametrize(("mode", "fails"), [("dedicated", False), ("observe", True), ("off", True)])
def test_nothing_is_left_behind(tmp_path, model, mode, fails):
    def settings():
        return sys.getswitchinterval(), signal.getsignal(signal.SIGTERM), logging.getLogger().level

    before = settings()
    with suppress(ValueError), aorta.record(tmp_path, model=model, mode=mode) as recording:
        train(model, recording, 1)
        if fails:
            raise ValueError
    for module in model.modules():
        assert (dict(module._forward_hooks), dict(module._forward_pre_hooks)) == ({}, {})
        assert "_compiled_call_impl" not in vars(module)
    assert settings() == before
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
    with pytest.raises(ConfigError, match="the recording has ended"):
        recording.step()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "fast"}, "mode='fast': must be one of dedicated, observe, off"),
        ({"warmup_steps": -1}, "warmup_steps=-1: must be at least 0"),
        ({"workload": {"model": object()}}, "must be a mapping of JSON types"),
        ({"blocks": ["9"]}, "blocks='9'"),
        ({"model": []}, r"model=\[\]: must be a module, or a list of modules"),
        ({"loggers": ["tensorbord"]}, r"loggers: 'tensorbord': must be one of tensorboard, wandb"),
        ({"loggers": "wandb"}, r"loggers='wandb': must be a list: loggers=\['wandb'\]"),
        ({"loggers": [aorta.Logger]}, r"an object \(not its class\) with the methods of aorta\.Logger"),
        ({"loggers": [object()]}, r"must be one of .* or an object .* with the methods of aorta\.Logger"),
        ({"loggers": ["wandb"]}, r'loggers=wandb: wandb is not installed: pip install "PATH/TO/CHECKOUT\[wandb\]"'),
        ({"profiling": "d9"}, r"there is no preset 'd9'; there are aorta, d9d, tutorial, composer"),
        ({"profiling": {"perod": 4}}, r"Key 'perod' not in"),
        ({"profiling": 7}, r"profiling=7: give a preset \(aorta, d9d, tutorial, composer\)"),
        ({"profiling": {"preset": "d9d", "period": 2}}, "period=2, warmup=5, active=3"),
    ],
)
def test_refused_before_anything_is_written(tmp_path, model, monkeypatch, changes, words):
    monkeypatch.setattr("aorta.loggers.find_spec", lambda _module: None)
    with pytest.raises(ConfigError, match=words), aorta.record(tmp_path / "run", **{"model": model, **changes}):
        pass
    assert not (tmp_path / "run").exists()


def test_a_device_on_which_nothing_can_be_measured_is_refused_by_name(monkeypatch):
    def on(*devices: str) -> Any:
        return SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device(name)) for name in devices])

    monkeypatch.setattr(
        api_arguments, "lacks_streams", lambda device: iter(["it has no streams"] * (device.type == "mps"))
    )
    assert api_arguments.device_of(on("xpu:1", "xpu:1")) == torch.device("xpu:1")
    with pytest.raises(ConfigError, match=r"cannot measure on mps:0, .*: it has no streams; it needs"):
        api_arguments.device_of(on("mps:0"))
    for several in (("cpu", "cuda:0"), ("cuda:0", "cuda:1"), ("meta",)):
        with pytest.raises(ConfigError, match="they must be on one CPU or one accelerator: move the model there first"):
            api_arguments.device_of(on(*several))


def test_ranks_promised_but_not_there_and_a_second_recording_are_refused(tmp_path, model, monkeypatch):
    with monkeypatch.context() as promised:
        promised.setenv("WORLD_SIZE", "2")
        said = r"WORLD_SIZE=2, but torch\.distributed is not initialised"
        with pytest.raises(ConfigError, match=said), aorta.record(tmp_path, model=model):
            pass
    opened = aorta.record(tmp_path / "a", model=model)  # and the refusal left nothing open
    with opened, pytest.raises(ConfigError, match="open in this process already"):
        aorta.start(tmp_path / "b", model=model)
    assert footer(tmp_path / "a").reason == "completed"


def test_public_names_and_importing_them_loads_nothing_heavy():
    assert set(aorta.__all__) == {"Logger", "Profiler", "Recording", "TorchProfiler", "__version__", "record", "start"}
    assert all(hasattr(aorta, name) for name in aorta.__all__)
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        _ = aorta.recrod
    code = "import aorta, sys; print(aorta.__version__, *({'torch', 'pandas', 'numpy', 'msgspec'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.split() == [aorta.__version__]


ON_EACH_RANK = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import aorta

rank, meeting, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
for run in ("whole", "broken"):
    with aorta.record(f"{folder}/{run}", model=model) as recording:
        for step in range(3):
            if (run, step, rank) == ("broken", 2, 1):
                raise ValueError("bad batch")
            model(torch.ones(1, 2)).sum().backward()
            recording.step()
"""


@pytest.mark.dist
@pytest.mark.thorough
def test_two_recordings_of_one_group_and_a_rank_that_fails(tmp_path):
    def start(rank):
        words = [sys.executable, "-c", ON_EACH_RANK, str(rank), str(tmp_path / "meeting"), str(tmp_path)]
        return subprocess.Popen(words, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)

    ranks = [start(rank) for rank in (0, 1)]
    errors = [process.communicate(timeout=HANGS_S)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert "ValueError: bad batch" in errors[1]
    whole, broken = ([record(tmp_path / run, rank) for rank in (0, 1)] for run in ("whole", "broken"))
    for rank, seen in enumerate(whole):
        assert (seen.footer.reason, len(seen.steps)) == ("completed", 3)
        assert all(step.coverage.complete and step.coverage.seen >= 1 for step in seen.steps)
        assert (seen.header.local_rank, seen.header.node_rank, seen.header.world_size) == (rank, 0, 2)
    assert len({seen.header.run_id for seen in (*whole, *broken)}) == 2
    met, told = (seen.footer for seen in broken)
    assert told.error == "rank 1: ValueError: bad batch"
    assert (met.reason, met.exit_code, met.steps_written) == ("error", 1, 2)
    assert met.error.startswith("rank 0: RuntimeError")


def test_the_record_of_a_run_that_goes_on_says_so_and_that_of_a_killed_one_that(tmp_path, model):
    def ending() -> str | None:
        return load_run(tmp_path).health.endings["0"]

    with aorta.record(tmp_path, model=model) as recording:
        train(model, recording, 3)
        assert ending() == "still running"
    assert ending() == "completed"
    file = tmp_path / "rank_0_metrics.jsonl"
    header, *steps, _footer = file.read_text().splitlines()
    boot = json.loads(header)["clock"]["boottime_ns"]
    earlier = header.replace(f'"boottime_ns":{boot}', '"boottime_ns":1')  # of a process before this one, with its pid
    assert earlier != header
    file.write_text("\n".join([earlier, *steps, ""]))
    assert ending() == "killed (no footer)"
