"""The command line as a whole: what it composes and refuses, in which words, with which exit code.

`command_lines.json`, a line each: `words` (FOLDER is where the files are), with `files` beside; the exit `code`; what
is said, as a pattern (`match`) or as words (`says`), and what is not (`never`); `values` of the configuration that
would run. A refusal runs nothing, imports nothing that it names, and says its rule, not Hydra's. Rules between keys:
`test_rules.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from aorta.config.schema import GROUPS
from aorta.errors import PeerFailed
from aorta.experiments.plan import read_plan
from aorta.experiments.plan_command import parse
from aorta.train_command import compose as main
from aorta.train_command import main as train
from tests.config.conftest import ROOT

LINES = json.loads((Path(__file__).parent / "command_lines.json").read_text())
NOISE = ("Traceback", "base_", "To append", "searchpath", "HYDRA_FULL_ERROR")
CALLED = "called_by_aorta"
"""A module that a file names, to be imported by nobody."""


@pytest.mark.spec("A3", "B2", "B9", "D53", "D54", "D55")
@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['kind']}: {' '.join(line['words'])}")
def test_a_command_line_runs_or_is_refused(door, line, tmp_path, monkeypatch):
    for name, text in {f"{CALLED}.py": "", **line.get("files", {})}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    answer = door(*(word.replace("FOLDER", str(tmp_path)) for word in line["words"]))
    assert (answer.code, CALLED in sys.modules) == (line["code"], False), answer.err
    if line["code"]:
        assert (answer.jobs, answer.out) == ([], "")
        assert answer.err.startswith("error: ")
        assert [noise for noise in NOISE if noise in answer.err and noise not in str(line)] == []
    assert re.search(line.get("match", ""), answer.err, re.MULTILINE), answer.err
    assert [words for words in line.get("says", ()) if words not in answer.err] == []
    assert [words for words in line.get("never", ()) if words in answer.err] == []
    for key, value in line.get("values", {}).items():
        assert OmegaConf.select(OmegaConf.create(json.loads(json.dumps(answer.job.plain))), key) == value


@pytest.mark.spec("D56")
def test_no_words_run_the_default_and_hydra_leaves_nothing_behind(door, tmp_path):
    job = door().job
    assert (job.config.training.max_steps, job.config.parallel.strategy, job.config.label) == (200, "ddp", None)
    assert list(tmp_path.iterdir()) == []
    # A copy of our own file works from elsewhere.
    text = (ROOT / "config/default.yaml").read_text()
    (tmp_path / "default.yaml").write_text(f"{text}training: {{max_steps: 7}}\n")
    assert door("--config", "default.yaml").job.config.training.max_steps == 7


# --- two styles, one meaning -------------------------------------------------------------------------------------


@pytest.mark.spec("D50", "D51", "D52")
def test_the_older_command_and_the_native_one_show_the_same_configuration(door):
    """How each word is translated: `test_arguments.py`."""
    four = ("profiling.enabled=true", "profiling.wait=1", "profiling.warmup=1", "profiling.active=3")
    older = ("--override", *four[:2], "--config", str(ROOT / "config/default.yaml"), "--override", *four[2:])
    shown = [OmegaConf.create(door(*words, "--cfg", "job").out) for words in (older, four)]
    assert shown[0] == shown[1]
    assert [shown[0].profiling[name] for name in ("enabled", "wait", "warmup", "active")] == [True, 1, 1, 3]


# --- refusals, exit codes and what is left behind -----------------------------------------------------------------


def test_the_exit_code_is_the_run_s_and_a_bug_keeps_its_traceback(door, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert main(lambda resolved: 143, ROOT / "config") == 143
    assert main(Mock(side_effect=PeerFailed("rank 1 is gone")), ROOT / "config") == 5
    assert capsys.readouterr().err == "error: rank 1 is gone\n"
    with pytest.raises(ValueError, match="a bug"):
        main(Mock(side_effect=ValueError("a bug")), ROOT / "config")


def test_help_names_every_group_and_option_and_every_file_has_a_schema(door):
    answer = door("--help")
    assert (answer.code, answer.jobs, answer.err) == (0, [], "")
    lines = {words[0]: words[1:] for line in answer.out.splitlines() if (words := line.replace(",", " ").split())}
    files = [path.relative_to(ROOT / "config") for path in (ROOT / "config").glob("*/*.yaml")]
    experiments = {path.stem for path in files if path.parent.name == "experiment"}
    for group, options in {**GROUPS, "experiment": experiments}.items():
        assert set(options) <= set(lines[group]), f"--help must list the options of {group}: {list(options)}"
    named = {f"{group}/{option}.yaml" for group, options in GROUPS.items() for option in options}
    assert {str(path) for path in files if path.parent.name != "experiment"} <= named


# --- quick, and without the heavy libraries -----------------------------------------------------------------------


@pytest.mark.parametrize(("words", "code"), [(["--cfg", "job"], 0), (["training.max_steps=0"], 1)])
def test_looking_and_erring_load_neither_torch_nor_pandas(words, code, tmp_path):
    own = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    run = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *words]
    done = subprocess.run(run, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "omegaconf" in imported
    assert {"torch", "pandas", "numpy", "matplotlib"} & imported == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "-m --nproc_per_node 2 label=sizes training.batch_size=2,4 fabric=emulated",
            "--output artifacts/sizes --launches 1 --nproc_per_node 2 --vary training.batch_size=2,4 fabric=emulated",
        ),
        (
            "training.output_dir=out '+x=range(1,3)' --multi ~y hydra/sweeper=basic label=a,b",
            "--output out/sweep --launches 1 --nproc_per_node 1 --vary 'x=range(1,3)' '~y'",
        ),
        (
            "--config 'a b.yaml' --override a=1,2 b=[1,2] hydra.mode=MULTIRUN",
            "--output artifacts/sweep --launches 1 --nproc_per_node 1 --vary a=1,2 -- --config 'a b.yaml' 'b=[1,2]'",
        ),
    ],
)
@pytest.mark.spec("D57")
def test_a_sweep_is_refused_with_the_line_that_launches_the_same(words, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(shlex.split(words)) == 2
    assert f"\n  aorta ab {line}\n" in capsys.readouterr().err
    asked = read_plan(parse(shlex.split(line)), tmp_path)
    assert (len(asked.sides), asked.launches) == (3, 1)
    assert list(tmp_path.iterdir()) == []
