"""Forty provocations: what a person types wrongly, the exit code, and what the last words of the answer must say.

One table. A message names what was wrong, where, what is allowed, and what to do; never a traceback. Rank 0 says its
error; that of another rank is in the launcher's summary, and none is lost.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Final

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from aorta import commands
from aorta.command_line import command
from aorta.errors import ConfigError
from tests.analysis.builders import header, simulated_run, write_rank
from tests.analysis.compare.builders import launch_set
from tests.runs import HANGS_S, ROOT, SMALL, environment, finished

ROWS: Final = [row for rows in json.loads(Path(__file__).with_suffix(".json").read_text()).values() for row in rows]
"""Words after `aorta`, the exit code, what the last lines of stderr (or of stdout, where it is 0) have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the rows name."""
    here = tmp_path_factory.mktemp("messages")
    for name in ("run", "other", "artifacts/cuda"):
        simulated_run(here / name, label=Path(name).name, ranks=2, steps=5)
    simulated_run(here / "one", label="one", ranks=1, steps=5)
    write_rank(here / "zero", header(), [])
    for name in ("empty", "hollow", "torn"):
        (here / name).mkdir()
    simulated_run(here / "above" / "a" / "b", label="b", ranks=1, steps=5)
    (here / "twice").mkdir()
    for rank in range(2):
        (here / "twice" / f"rank_{rank}_metrics.jsonl").touch()
    (here / "hollow" / "rank_0_metrics.jsonl").touch()
    (here / "torn" / "rank_0_metrics.jsonl").write_text('{"kind": "header", "schema_ver')
    (here / "empty.json").touch()
    whole = gzip.compress(json.dumps({"traceEvents": [{"ph": "X"}] * 500}).encode())
    (here / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    (here / "taken").write_text("a file")
    (here / "traces").symlink_to(ROOT / "tests/samples/two_gloo_ranks/torch_profiler")
    launch_set(here / "plan" / "reference", (0.8, 0.81))
    launch_set(here / "plan" / "candidate", (0.8, 0.81))
    return here


@pytest.mark.parametrize(("words", "code", "said"), ROWS, ids=[words for words, _, _ in ROWS])
def test_a_provocation_is_answered_with_what_to_do(
    folder: Path, words: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["aorta"])
    try:
        ended = commands.main([*words.split(), *(["--no-html"] if code == 0 else [])])
    except SystemExit as end:  # argparse's
        ended = int(str(end.code))
    streams = capsys.readouterr()
    answer = streams.err if code else streams.out + streams.err
    assert (ended, "Traceback" in answer) == (code, False), answer
    assert said in " ".join(answer.split()), answer


@command()
def refused(message: str) -> int:
    raise ConfigError(message)


@pytest.mark.parametrize(
    ("rank", "message", "said", "left"),
    [
        ("", "no such device", "error: no such device\n", "no such device"),
        ("0", "no such device", "error: no such device\n", "no such device"),
        ("1", "no such device", "", "rank 1: no such device"),
        ("1", "rank 1: ValueError: broken", "", "rank 1: ValueError: broken"),
        ("1", "rank 12 is missing", "", "rank 1: rank 12 is missing"),
    ],
)
def test_rank_zero_speaks_and_every_rank_leaves_its_error_where_torchrun_reads_it(
    monkeypatch, tmp_path, capsys, rank, message, said, left
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    if rank:
        monkeypatch.setenv("RANK", rank)
    assert refused(message) == ConfigError.exit_code
    assert capsys.readouterr().err == said
    found = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert found.message["message"] == left
    assert found.timestamp > 0


def test_a_rank_without_a_launcher_that_reads_speaks_for_itself(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "3")
    first = tmp_path / "error.json"
    first.write_text("{}")  # the error that came first
    for path in (None, tmp_path / "missing" / "error.json", first):
        if path:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        assert refused("broken") == 1
        assert capsys.readouterr().err == "error: rank 3: broken\n"
    assert first.read_text() == "{}"


@pytest.mark.thorough
@pytest.mark.dist
def test_aorta_train_adds_nothing_to_the_error_and_passes_the_exit_code_on(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "aorta", "train", "--nproc_per_node", "2", *SMALL]
    own = environment()
    del own["OMP_NUM_THREADS"]  # without it torchrun has something to say as well
    done = finished([*words, f"training.output_dir={tmp_path}", "training.start_step=3"], HANGS_S, own)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.removeprefix("error: ").removeprefix("rank 1: ").startswith("training.start_step=3: no checkpoint")


def test_a_folder_that_may_not_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(self: Path, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.chdir(folder)
    monkeypatch.setattr(Path, "stat", denied)
    assert commands.main(["report", "run"]) == 2
    assert capsys.readouterr().err.startswith("error: run/candidate-1: no permission (Permission denied)")
