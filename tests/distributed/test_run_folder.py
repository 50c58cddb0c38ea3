"""One folder a run: what an earlier run left is kept whole under history/, and nobody else's files are touched."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch.distributed as dist

from aorta.distributed import output_folder
from aorta.distributed.output_folder import LOCK_FILE, RunFolder, occupied, prepare, write_manifest
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from aorta.errors import ConfigError, RunIncomplete
from aorta.records.files import shared_folder
from tests.distributed.conftest import place


def leave_a_run(folder: RunFolder, *, elastic_run_id: str | None = None, ranks: int = 2) -> None:
    """What a run leaves behind."""
    for rank in range(ranks):
        for path in (folder.record(rank), folder.log(rank), folder.traces(rank) / "x.pt.trace.json"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{folder.run_id} {folder.attempt}")
    folder.checkpoints.mkdir(exist_ok=True)
    (folder.checkpoints / "step_3").write_text(folder.run_id)
    identity = {"run_id": folder.run_id, "attempt": folder.attempt, "elastic_run_id": elastic_run_id}
    write_manifest(folder, identity)


def tree(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != LOCK_FILE)
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir() if item.name != LOCK_FILE)


def cleared(path: Path, topology: Topology, peers: Peers, *, overwrite: bool = False, resuming: bool = False):
    with occupied(path, topology, peers) as folder:
        prepare(folder, topology, peers, overwrite=overwrite, resuming=resuming)
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "deep" / "artifacts"


@pytest.fixture
def start(world, out):
    """Prepares the folder as `ranks` ranks; gives the folder they agreed on."""

    def prepared(*, ranks=2, path=out, per_node=None, overwrite=False, resuming=False, **facts):
        def work(peers):
            topology = place(peers.rank, ranks, per_node=per_node, **facts)
            return cleared(path, topology, peers, overwrite=overwrite, resuming=resuming)

        folders = world(ranks, work)
        for outcome in folders:
            if isinstance(outcome, Exception):
                raise outcome
        assert len(set(folders)) == 1
        return folders[0]

    return prepared


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda lock, theirs: lock.symlink_to(theirs), "a link or no regular file"),
        (lambda lock, theirs: lock.hardlink_to(theirs), "a link or no regular file"),
        (lambda lock, theirs: lock.write_text(theirs.read_text()), "no lock of AORTA's; move it away"),
    ],
)
def test_a_lock_that_is_none_of_ours_is_left_as_it_is(start, out, put, why):
    out.mkdir(parents=True)
    theirs = out / "thesis.txt"
    theirs.write_text("years of work")
    put(out / LOCK_FILE, theirs)
    with pytest.raises(RunIncomplete, match=why):
        start(ranks=1)
    assert theirs.read_text() == (out / LOCK_FILE).read_text() == "years of work"


@pytest.mark.parametrize(("ranks", "per_node"), [(2, None), (8, 2)], ids=["one node", "four nodes on one disk"])
def test_a_second_run_moves_the_first_into_history_whole_and_says_so(start, out, capfd, monkeypatch, ranks, per_node):
    monkeypatch.chdir(out.parent.parent)
    first = start(ranks=ranks, per_node=per_node, path=Path("deep", "artifacts"))
    assert (first.path, first.attempt, names(out), capfd.readouterr().err) == (out, 0, [], "")
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{4}", first.run_id)
    leave_a_run(first, ranks=ranks)
    before = tree(out)
    second = start(ranks=ranks, per_node=per_node)
    kept = f"deep/artifacts/history/{first.run_id}-attempt0"
    assert capfd.readouterr().err == f"aorta: the earlier run in deep/artifacts is kept in {kept}\n"
    assert names(out) == ["history"]
    assert tree(Path(kept)) == before

    leave_a_run(second)
    third = start()
    assert names(out / "history") == sorted(f"{run.run_id}-attempt0" for run in (first, second))
    assert tree(Path(kept)) == before
    assert len({first.run_id, second.run_id, third.run_id}) == 3


@pytest.mark.spec("D1")
def test_overwriting_replaces_the_last_run_but_neither_history_nor_what_is_foreign(start, out):
    foreign = ["notes.txt", "rank_0.jsonl", "cuda/rank_0_metrics.jsonl", "cuda/run.json", "run.json.bak"]
    first = start()
    leave_a_run(first)
    for name in foreign:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    leave_a_run(start())
    start(overwrite=True)
    assert names(out / "history") == [f"{first.run_id}-attempt0"]
    assert {name for name in tree(out) if not name.startswith("history/")} == set(foreign)


@pytest.mark.parametrize("overwrite", [False, True])
def test_resuming_keeps_the_checkpoints_where_they_are(start, out, overwrite):
    first = start()
    leave_a_run(first)
    start(resuming=True, overwrite=overwrite)
    assert tree(out / "checkpoints") == {"step_3": first.run_id.encode()}
    assert not (out / "history" / f"{first.run_id}-attempt0" / "checkpoints").exists()
    assert not list(out.glob("rank_*"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_restart_by_torchrun_keeps_the_run_id_and_archives_the_attempt_before(start, out, overwrite):
    first = start(elastic_run_id="e1")
    for attempt in (1, 2):
        leave_a_run(RunFolder(out, first.run_id, attempt - 1), elastic_run_id="e1")
        before = {name: content for name, content in tree(out).items() if not name.startswith("history/")}
        again = start(elastic_run_id="e1", restart_count=attempt, overwrite=overwrite)
        assert (again.run_id, again.attempt) == (first.run_id, attempt)
        assert tree(out / "history" / f"{first.run_id}-attempt{attempt - 1}") == before
    leave_a_run(again, elastic_run_id="e1")
    other = start(elastic_run_id="e2", restart_count=1)  # it finds another run's files: a run of its own
    assert other.run_id != first.run_id
    assert other.attempt == 1


def test_two_names_in_history_never_collide(start, out):
    for number in range(3):
        leave_a_run(RunFolder(out, "same", 0))
        start()
        assert names(out / "history") == ["same-attempt0", "same-attempt0-2", "same-attempt0-3"][: number + 1]
    assert all(tree(kept) for kept in (out / "history").iterdir())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "unknown-attempt0"),
        ("[1]", "unknown-attempt0"),
        ("\udcff", "unknown-attempt0"),
        ("{}", "unknown-attempt0"),
        ('{"run_id": "../../x", "attempt": "/y"}', "_.._x-attempt_y"),
        ('{"run_id": "a\\u0000b"}', "a_b-attempt0"),
        (json.dumps({"run_id": "x" * 999}), "x" * 119 + "-attempt0"),
    ],
    ids=["empty", "a list", "not text", "no run id", "a path", "a null byte", "too long"],
)
def test_whatever_run_json_holds_the_earlier_run_is_kept_inside_history(start, out, text, name):
    leave_a_run(RunFolder(out, "first", 0))
    (out / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    before = tree(out)
    start(restart_count=1, elastic_run_id="e1")
    assert names(out / "history") == [name]
    assert tree(out / "history" / name) == before


def test_a_folder_that_cannot_be_made_fails_every_rank_and_names_the_one_that_met_it(world, tmp_path):
    (tmp_path / "file").write_text("in the way")

    def work(peers):
        # Rank 2 is the first of its node, and its disk is the bad one.
        path = tmp_path / ("file" if peers.rank == 2 else "good") / "artifacts"
        return cleared(path, place(peers.rank, 4, per_node=2), peers)

    for outcome in world(4, work):
        assert type(outcome) is RunIncomplete
        assert re.fullmatch(
            r"rank 2: cannot prepare .*/file/artifacts: Not a directory; choose another folder", str(outcome)
        )


def refusing(monkeypatch, number: int, names: set[str]) -> None:
    """The system refuses to rename what is called so."""
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name in names:
            raise OSError(number, os.strerror(number))
        return rename(path, target)

    monkeypatch.setattr(output_folder.Path, "rename", refuse)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EXDEV])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_on_a_disk_of_its_own_moves_on_that_disk(start, out, monkeypatch, number, overwrite):
    start()
    (out / "checkpoints" / "lost+found").mkdir(parents=True)
    refusing(monkeypatch, number, {"checkpoints", "torch_profiler", "lost+found"})
    start()  # an empty disk is no earlier run
    assert names(out) == ["checkpoints"]
    kept = []
    for _ in range(2):
        leave_a_run(first := start())
        start(overwrite=overwrite)
        kept += [] if overwrite else [f"{first.run_id}-attempt0"]
        for disk, name in (("checkpoints", "step_3"), ("torch_profiler", "rank1/x.pt.trace.json")):
            history = out / disk / "history"
            assert sorted(path.name for path in history.glob("*")) == sorted(kept)
            assert all((history / one / name).is_file() for one in kept)
            assert {path.name for path in (out / disk).glob("*")} <= {"history", "lost+found"}
        assert not list(out.glob("rank_*"))
        assert all((out / "history" / one / "run.json").is_file() for one in kept)


@pytest.mark.parametrize("refused", ["run.json", "logs", "checkpoints"])
def test_an_earlier_run_is_moved_whole_or_not_at_all_and_every_rank_fails(start, world, out, monkeypatch, refused):
    leave_a_run(start())
    before = tree(out)
    refusing(monkeypatch, errno.EACCES, {refused})
    outcomes = world(2, lambda peers: cleared(out, place(peers.rank, 2), peers))
    said = f"rank 0: cannot prepare {out}: Permission denied"
    assert [(type(outcome), str(outcome).partition(";")[0]) for outcome in outcomes] == [(RunIncomplete, said)] * 2
    assert tree(out) == before
    assert not list(out.glob("history/*"))


@pytest.mark.parametrize(("mode", "lock"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666), (0o1777, 0o666)])
def test_a_run_is_as_open_as_its_folder_and_its_lock_to_writers_alone(start, out, mode, lock):
    out.mkdir(parents=True)
    out.chmod(mode)
    first = start()
    leave_a_run(first)
    start()
    kept = out / "history" / f"{first.run_id}-attempt0"
    modes = [path.stat().st_mode & 0o7777 for path in (out / LOCK_FILE, kept.parent, kept)]
    assert modes == [lock, mode, mode]


@pytest.mark.skipif(os.geteuid() != 0, reason="one user cannot be two")
def test_users_record_in_turn_in_a_shared_folder():
    with TemporaryDirectory() as folder:  # which all may enter, as pytest's
        Path(folder).chmod(0o755)
        (out := Path(folder, "out")).mkdir()
        out.chmod(0o777)
        for number, user in enumerate((65533, 65534, 65533)):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setresgid(user, user, user)
                    os.setresuid(user, user, user)
                    run = cleared(out, place(), Peers(dist.HashStore(), 0, 1, 5.0))
                    shared_folder(out / "progress")
                    run.record(0).write_text(run.run_id)
                    (out / "progress" / "x").write_text(run.run_id)
                    write_manifest(run, {"run_id": run.run_id, "attempt": 0})
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert (out / "rank_0_metrics.jsonl").stat().st_uid == user
            assert len(list(out.glob("history/*/progress/x"))) == number


@pytest.mark.parametrize("per_node", [4, 2], ids=["one node", "two nodes"])
def test_a_second_run_is_refused_until_the_first_has_ended_and_moves_nothing(start, world, out, per_node):
    def work(peers):
        topology = place(peers.rank, 4, per_node=per_node, pid=77 + peers.rank)
        with occupied(out, topology, peers) as first:
            prepare(first, topology, peers, overwrite=False, resuming=False)
            if peers.rank == 0:
                leave_a_run(first)
                before = tree(out)
                in_use = rf"rank 0: {out}: in use by run {first.run_id}, .*process 77 on node;"
                for attempt in (0, 1):  # the next attempt too, while a rank of the first lives
                    with pytest.raises(ConfigError, match=in_use):
                        start(restart_count=attempt)
                assert tree(out) == before
            peers.gather("looked", True)
        return first

    (first, *_) = world(4, work)
    assert start().run_id != first.run_id
