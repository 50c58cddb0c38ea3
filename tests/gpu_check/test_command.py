"""The command round the table: what it refuses, what it starts, whose exit code it takes. Without a device."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from aorta.errors import ConfigError, RunIncomplete
from aorta.gpu_check import check_command, check_ranks
from aorta.gpu_check.check_ranks import PAIRS
from aorta.gpu_check.check_table import CheckReport, CheckVerdict
from tests.runs import ROOT

WRITES = """
import sys
from pathlib import Path
path, code = Path(sys.argv[1]), int(sys.argv[2].rpartition("=")[2])
if code < 10:
    path.write_text('{"facts": {}, "rows": [], "verdict": "", "exit_code": %d}' % code)
sys.exit(0 if code < 10 else 1)
"""


@pytest.fixture
def a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def launched(monkeypatch):
    """What is started in place of torchrun: a program that writes a report; gives its words."""
    words: list[str] = []
    real = subprocess.Popen

    def start(given, **keywords):
        words[:] = given
        return real([sys.executable, "-c", WRITES, given[given.index("aorta.gpu_check.check_ranks") + 1], given[-1]])

    monkeypatch.setattr(subprocess, "Popen", start)
    return words


def test_without_a_device_the_check_says_so_and_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_command.main([]) == 1
    assert capsys.readouterr().err.strip() == f"error: {check_command.NO_DEVICE}"


@pytest.mark.parametrize(("text", "expected"), [(None, 4), ("", 4), ("2", 2)])
def test_one_process_a_device_unless_told_otherwise(text, expected):
    assert check_command.processes({} if text is None else {"NPROC": text}, 4) == expected


def test_ranks_that_share_devices_are_more(a_device, launched, monkeypatch, tmp_path):
    monkeypatch.delenv("NPROC", raising=False)
    words = ["training.ranks_per_device=2", "training.seed=0"]
    assert check_command.main(["--json", str(tmp_path / "x.json"), *words]) == 0
    assert launched[launched.index("--nproc_per_node") + 1] == "4"
    assert launched[-4:] == ["ddp,fsdp", str(PAIRS), *words]
    assert check_command.processes({}, 1, 2) == 2
    with pytest.raises(ConfigError, match=r"1 to 2: torch sees 1"):
        check_command.processes({"NPROC": "3"}, 1, 2)


@pytest.mark.parametrize("text", ["0", "x", "-1", "5"])
def test_a_number_of_processes_that_cannot_be(text):
    with pytest.raises(ConfigError, match=rf"NPROC='{text}': must be a whole number of processes, 1 to 4"):
        check_command.processes({"NPROC": text}, 4)


def test_a_wrong_word_is_refused_before_anything_starts(a_device, launched, capsys, tmp_path):
    assert check_command.main(["--json", str(tmp_path / "x.json"), "training.batch_size=0"]) == 1
    assert "training.batch_size=0" in capsys.readouterr().err
    assert launched == []


@pytest.mark.parametrize("code", [0, 1, 4])
def test_the_exit_code_is_the_report_s(a_device, launched, monkeypatch, tmp_path, code, capsys):
    monkeypatch.delenv("NPROC", raising=False)
    path, seed = tmp_path / "x.json", f"training.seed={code}"
    assert check_command.main(["--json", str(path), "parallel=ddp,tp", seed]) == code
    assert launched[-4:] == [str(path), "ddp,tp", str(PAIRS), seed]
    assert launched[launched.index("--nproc_per_node") + 1] == "2"
    assert capsys.readouterr().out == f"the same as JSON: {path}\n"


@pytest.mark.parametrize("text", ["0", "-1", "x"])
def test_a_number_of_pairs_that_cannot_be(text, capsys):
    with pytest.raises(SystemExit):
        check_command.parser().parse_args(["--pairs", text])
    assert "must be a whole number from 1 on" in capsys.readouterr().err


def test_ranks_that_end_early_do_not_leave_an_older_report_to_answer(launched, tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"facts": {}, "rows": [], "verdict": "", "exit_code": 0}')
    with pytest.raises(RunIncomplete, match="ended with exit code 1 before the table was written"):
        check_command.checked(path, 2, ["ddp"], ["10"])
    assert not path.exists()


@pytest.mark.parametrize(
    ("setting", "verdict", "value"),
    [(None, CheckVerdict.OK, "not set"), ("8", CheckVerdict.OK, "=8"), ("1", CheckVerdict.FAILED, "=1")],
)
def test_one_hardware_queue_for_all_streams_has_a_row_of_its_own(setting, verdict, value):
    environment = {} if setting is None else {"CUDA_DEVICE_MAX_CONNECTIONS": setting}
    first, *others = check_ranks.setting_rows(environment, "cuda")
    assert (first.what, first.value, first.verdict) == ("CUDA_DEVICE_MAX_CONNECTIONS", value, verdict)
    assert [row.verdict for row in others] == ([CheckVerdict.INFORMATION] if setting == "1" else [])


def test_other_settings_that_change_the_answer_are_told():
    (row,) = check_ranks.setting_rows({"GPU_MAX_HW_QUEUES": "2"}, "rocm")
    assert row.what == "GPU_MAX_HW_QUEUES=2"
    assert "share a queue" in row.value


def test_it_runs_where_no_developer_s_tools_are():
    """In a fresh interpreter in which pytest and hypothesis cannot be imported."""
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('pytest', 'hypothesis', 'tests')))\n"
        "import aorta.gpu_check.check_command, aorta.gpu_check.check_ranks\n"
        "print(sorted(name for name in sys.modules if name.startswith('tests.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_report_has_plain_json_types():
    report = CheckReport({"words": ["a=1"]}, [check_ranks.setting_rows({}, "cuda")], "passed", 0)
    plain = msgspec.json.decode(msgspec.json.encode(report))
    assert plain["rows"][0][0]["verdict"] == "ok"
