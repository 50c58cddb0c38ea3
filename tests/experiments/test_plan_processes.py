"""Plans as processes: signals, a runner killed outright, a launch that hangs (nothing is left behind, nothing mixes),
and a program of one's own launched as a user starts it. Those of train.py are launched by the demo
(`tests/test_package.py`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import signal
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from aorta.errors import ConfigError, RecordWriteError
from aorta.experiments.launch_journal import PLAN_JOURNAL, Closed, Journal, PlanLine
from aorta.read.record import load_run
from aorta.records.files import read_lines
from tests.experiments.conftest import Bench
from tests.experiments.test_process import gone, has_ended
from tests.libraries import stand_in
from tests.runs import HANGS_S, ROOT, finished, until

AB = ("--launches", "1", "--candidate", "a=2")


def hanging(bench: Bench) -> dict[str, int]:
    """Once a launch hangs: ids of its torchrun and of its rank."""
    (call,) = until(lambda: [call for call in bench.calls if call["call"] == "hangs"])
    return {name: call[name] for name in ("pid", "rank")}


@pytest.mark.thorough
def test_a_signal_ends_the_launch_its_ranks_and_the_plan(bench):
    bench.acts(candidate_00={"hang": 1})
    runner = bench.start(*AB)
    left = hanging(bench)
    runner.send_signal(signal.SIGINT)
    _, err = runner.communicate(timeout=HANGS_S)
    assert runner.returncode == 128 + signal.SIGINT
    assert "stopped; run the same command again for the missing launches" in err
    assert has_ended(left["pid"])
    assert has_ended(left["rank"])
    end = bench.events("end")[-1]
    assert (end["outcome"], end["reason"], end["left_behind"]) == ("stopped", "stopped by SIGINT", 1)
    assert bench.events("close")[-1]["exit_code"] == 128 + signal.SIGINT
    code, _, _ = bench(*AB)
    assert code == 0
    assert bench.launched == ["reference/00", "candidate/00", "candidate/00"]
    assert (bench.home / "plan" / "aside" / "candidate" / "00.stopped").is_dir()


@pytest.mark.thorough
def test_a_terminal_that_was_closed_costs_neither_the_journal_nor_the_exit_code(bench):
    bench.acts(reference_00={"hang": 1})
    mine, its = pty.openpty()
    runner = bench.start(*AB, stderr=its)
    os.close(its)
    left = hanging(bench)
    os.close(mine)  # what is written from now on fails with EIO
    runner.terminate()
    runner.communicate(timeout=HANGS_S)
    assert runner.returncode == 143
    assert bench.events("close")[-1]["exit_code"] == 143
    assert has_ended(left["rank"])


@pytest.mark.thorough
def test_a_runner_killed_outright_leaves_no_torchrun_and_its_launch_is_done_again(bench):
    bench.acts(candidate_00={"hang": 1})
    runner = bench.start(*AB)
    left = hanging(bench)
    runner.kill()
    runner.communicate(timeout=HANGS_S)
    assert gone(left["pid"])  # Linux tells it; without, the next runner ends it
    assert not has_ended(left["rank"])
    code, _, _ = bench(*AB)
    assert code == 0
    assert has_ended(left["rank"])
    assert bench.launched == ["reference/00", "candidate/00", "candidate/00"]
    lost = next(end for end in bench.events("end") if end["outcome"] == "lost")
    assert (lost["launch"], lost["left_behind"], lost["kept"]) == ("candidate/00", 1, "aside/candidate/00.lost")
    assert (bench.home / "plan" / lost["kept"] / "rank_0_metrics.jsonl").read_text() == "{"


@pytest.mark.dist
def test_a_program_of_the_users_own_with_two_builds_of_a_library(tmp_path):
    builds = {side: stand_in(tmp_path / side, 22703, side) for side in ("reference", "candidate")}
    program = f"{{torchrun}} --standalone --nproc_per_node 2 {ROOT}/docs/examples/ddp.py {{output}}"
    command = ["bash", str(ROOT / "scripts" / "ab.sh"), "--output", "o", "--launches", "1", "--command", program]
    reference, candidate = (f"env.LD_PRELOAD={library}" for library in builds.values())
    sides = ["--reference", reference, "--candidate", f"{candidate} env.NCCL_ALGO=Tree"]
    done = finished([*command, *sides], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "o" / PLAN_JOURNAL).read_text().splitlines()]
    ends = [(event["launch"], event["left_behind"]) for event in events if event["event"] == "end"]
    assert ends == [("reference/00", 0), ("candidate/00", 0)]
    for side, algorithm in (("reference", None), ("candidate", "Tree")):
        run = load_run(tmp_path / "o" / side / "00")
        assert (run.health.world_size, len(run.ranks[0].steps)) == (2, 12)
        manifest = json.loads((tmp_path / "o" / side / "00" / "run.json").read_text())
        assert manifest["environment"].get("NCCL_ALGO") == algorithm
        assert manifest["collective_library"]["path"] == str(builds[side])
        assert manifest["collective_library_differences"] == {}
    assert "aorta report o --all" in done.stdout
    found = json.loads((tmp_path / "reports" / "o" / "summary.json").read_text())["comparison"]
    differ = [each["key"] for each in found["manifest_differences"]]
    assert differ == ["collective_library", "environment.LD_PRELOAD", "environment.NCCL_ALGO"]
    assert found["losses"]["sentence"] == "bit-equal in all 24 rank-steps"


# --- the journal: lines that last, one writer at a time, what a kill leaves


FIRST, SECOND, THIRD = (Closed("", number, []) for number in range(3))


def journal(folder: Path) -> Journal:
    return Journal(folder / "journal.jsonl", in_use="somebody writes it")


@pytest.mark.parametrize("torn", [b"{", b"{}"])
def test_a_line_that_a_kill_cut_short_stays_alone(tmp_path, torn):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"1\n" + torn)
    with closing(journal(tmp_path)) as taken_up:
        taken_up.write(FIRST)
    assert path.read_bytes() == b"1\n" + torn + b'\n{"event":"close","time":"","exit_code":0,"failed":[]}\n'


def test_a_line_that_says_nothing_is_named_by_its_number(tmp_path):
    with closing(journal(tmp_path)) as written:
        written.write(FIRST, SECOND)
        written.path.write_bytes(written.path.read_bytes() + b'{"a\n\xff\n')
        written.write(THIRD)
        found, problems = read_lines(written.path, PlanLine)
    assert found == [FIRST, SECOND, THIRD]
    assert [problem.partition(": ")[0] for problem in problems] == ["journal.jsonl:3", "journal.jsonl:4"]


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path):
    with closing(journal(tmp_path)), pytest.raises(ConfigError, match="somebody writes it"):
        journal(tmp_path)
    held = journal(tmp_path)
    del held  # one that is forgotten is not held
    journal(tmp_path).close()


def test_on_a_disk_without_locks_it_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with closing(journal(tmp_path)) as written:
        written.write(FIRST)
    assert read_lines(written.path, PlanLine) == ([FIRST], [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_and_a_folder_that_is_not_there_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"no/journal\.jsonl: cannot be written: No such file"):
        journal(tmp_path / "no")
    with closing(journal(tmp_path)) as full, Path("/dev/full").open("r+b") as disk:
        os.dup2(disk.fileno(), full._file.fileno())
        with pytest.raises(RecordWriteError, match="No space left on device"):
            full.write(FIRST)
