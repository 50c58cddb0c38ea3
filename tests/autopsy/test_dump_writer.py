"""Our evidence as dumps, read by torch's own analyzer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.flight_recorder import fr_trace

from aorta.autopsy.dump_writer import write_dumps
from aorta.autopsy.evidence import RankEvidence
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from aorta.commands import main
from aorta.errors import InputError
from tests.autopsy.hangs import clipped, ddp, ended_in, pipeline, resized, run, skipped, stuck_in
from tests.autopsy.test_flight_recorder import dump, entry, write


@pytest.fixture
def torchfrtrace(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[[Path], str]:
    """What torch's analyzer says of a folder of dumps."""

    def said(folder: Path) -> str:
        caplog.clear()
        fr_trace.main([str(folder)])
        return capsys.readouterr().out + caplog.text

    return said


def written(evidence: list[RankEvidence], folder: Path) -> Path:
    write_dumps(evidence, folder)
    return folder


def test_it_matches_what_ran_to_its_end(tmp_path: Path, torchfrtrace: Callable[[Path], str]) -> None:
    said = torchfrtrace(written(run(clipped(3)), tmp_path))
    for complaint in ("Not all ranks joining", "has errors", "cannot decide", "mismatch"):
        assert complaint not in said


def test_it_misses_the_same_rank_in_the_same_collective(tmp_path: Path, torchfrtrace: Callable[[Path], str]) -> None:
    evidence = run(clipped(4), {2: stuck_in("optimizer")})
    (one,) = judge(evidence).culprits
    assert (one.rank, one.collective and one.collective.number) == (2, 5)
    said = torchfrtrace(written(evidence, tmp_path))
    assert "Not all ranks joining collective, sequence number: 6" in said
    assert "missing ranks: {2}" in said


def test_it_sees_the_same_mismatches(tmp_path: Path, torchfrtrace: Callable[[Path], str]) -> None:
    evidence = run(clipped(4, steps=4), {3: resized(7)})
    assert [one.rank for one in judge(evidence).culprits] == [3]
    said = torchfrtrace(written(evidence, tmp_path / "size"))
    assert "Collective sequence number: 8 has errors" in said
    assert "Culprit rank 3; Error type: SIZE_OR_SYNTAX_MISMATCH" in said
    said = torchfrtrace(written(run(clipped(4, steps=4), {3: skipped(7)}), tmp_path / "kind"))
    assert "Culprit rank 3; Error type: COLLECTIVE_TYPE_MISMATCH" in said


def test_what_one_rank_has_dropped_is_not_missed_on_it(tmp_path: Path, torchfrtrace: Callable[[Path], str]) -> None:
    evidence = run(clipped(3, steps=4), {1: stuck_in("optimizer", 3)})
    evidence[0].collectives = evidence[0].collectives[4:]
    said = torchfrtrace(written(evidence, tmp_path))
    assert said.count("Not all ranks joining") == 1
    assert "missing ranks: {1}" in said


@pytest.mark.parametrize(
    "evidence", [run(ddp(3), {1: stuck_in("data")}), run(clipped(2), {0: ended_in("forward", None)})]
)
def test_written_dumps_are_judged_as_the_evidence_was(evidence: list[RankEvidence], tmp_path: Path) -> None:
    again = judge(read_dumps([written(evidence, tmp_path)]))
    assert {one.rank for one in again.culprits} == {one.rank for one in judge(evidence).culprits}


def test_messages_are_left_out(tmp_path: Path) -> None:
    kinds = {one.kind for rank in read_dumps([written(run(pipeline(2)), tmp_path)]) for one in rank.collectives}
    assert kinds == {"all_reduce"}


def test_the_command_writes_dumps_into_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", [dump([entry(0, "completed")])] * 2)
    assert main(["autopsy", str(tmp_path / "in"), "--write-dumps", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"comm_lib_trace_rank_{rank}" for rank in (0, 1)
    ]
    assert "torchfrtrace" in capsys.readouterr().out
    with pytest.raises(InputError, match="holds dumps already"):
        write_dumps(run(ddp(2)), tmp_path / "out")
