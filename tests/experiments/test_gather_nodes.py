"""Folders of nodes become one run folder, or nothing does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import fsspec
import pytest

from aorta.analysis import load_run
from aorta.analysis.merge.merge_traces import merge_traces
from aorta.command_line import number_ranges
from aorta.distributed.output_folder import LOG_DIR, TRACE_DIR
from aorta.experiments.gather_nodes import FOLDERS, main, url_of
from tests.analysis.builders import header, metrics, step, write_manifest, write_rank
from tests.runs import HANGS_S, ROOT, SMALL, environment, finished, free_port, record

STEPS = [step(global_step=n, overlap=metrics(10.0, 6.0, 4.0, 3.0)) for n in range(3)]


def node(folder, ranks, world_size=4, run_id="run-1", manifest=False):
    """What one node of a run leaves, beside things that are none of its run."""
    for name in ("logs", "history/old", "checkpoints/step_2", "other_label"):
        (folder / name).mkdir(parents=True)
    for rank in ranks:
        write_rank(folder, header(rank, world_size, run_id=run_id, node_rank=rank // 2), STEPS)
        (folder / "logs" / f"rank_{rank}.log").write_text(f"rank {rank}")
        traces = folder / "torch_profiler" / f"rank{rank}"
        traces.mkdir(parents=True)
        (traces / "step_4.json.gz").write_bytes(os.urandom(3_000_000) if rank == 0 else b"trace %d" % rank)
    if manifest:
        write_manifest(folder, run_id=run_id, world_size=world_size)
    for name in ("history/old/rank_0_metrics.jsonl", "checkpoints/step_2/x.pt", "other_label/rank_0_metrics.jsonl"):
        (folder / name).write_text("of no concern")
    return folder


@pytest.fixture
def nodes(tmp_path):
    return node(tmp_path / "n0", (0, 1), manifest=True), node(tmp_path / "n1", (2, 3))


@pytest.fixture
def gather(tmp_path, capsys):
    def run(*sources, into="both", also=()):
        words = [str(source) for source in sources]
        code = main([*words, "--into", str(tmp_path / into), *(f"--also={name}" for name in also)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wanted(folder):
    """A node's files that belong to its run, told by hand."""
    return {
        name: content
        for name, content in contents(folder).items()
        if not name.startswith(("history/", "checkpoints/", "other_label/"))
    }


def leftovers(tmp_path):
    return [path.name for path in tmp_path.iterdir() if path.name not in {"n0", "n1"}]


def test_every_file_arrives_whole_and_the_sources_stay(gather, nodes, tmp_path):
    before = [contents(folder) for folder in nodes]
    code, out, err = gather(*nodes)
    assert (code, err) == (0, "")
    assert contents(tmp_path / "both") == wanted(nodes[0]) | wanted(nodes[1])
    assert len(contents(tmp_path / "both")) == 4 * 3 + 1
    assert [contents(folder) for folder in nodes] == before
    assert "run run-1, 4 of 4 ranks, 13 files" in out
    assert leftovers(tmp_path) == ["both"]
    run = load_run(tmp_path / "both")
    assert (sorted(run.ranks), run.health.ranks_missing) == ([0, 1, 2, 3], ())


def test_a_new_folder_has_the_rights_that_folders_have_here(gather, nodes, tmp_path):
    (tmp_path / "usual").mkdir()
    gather(*nodes)
    assert (tmp_path / "both").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_missing_ranks_are_named_and_what_is_there_is_kept(gather, nodes, tmp_path):
    code, _, err = gather(nodes[1])
    assert code == 5
    assert "no record of rank 0-1 of 4" in err
    assert contents(tmp_path / "both") == wanted(nodes[1])
    # What was missing is added in a new folder, the gathered one among the sources.
    code, _, _ = gather(tmp_path / "both", nodes[0], into="all")
    assert code == 0
    assert contents(tmp_path / "all") == wanted(nodes[0]) | wanted(nodes[1])


def test_a_missing_manifest_is_said(gather, nodes):
    assert "run.json is in none of the folders: the node of rank 0 has it" in gather(nodes[1])[1]


def test_one_folder_by_two_ways_is_no_contradiction(gather, nodes, tmp_path):
    (tmp_path / "link").symlink_to(nodes[0])
    assert gather(nodes[0], tmp_path / "link", nodes[1])[0] == 0


def refused(answer, *said):
    code, out, err = answer
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert [part for part in said if str(part) not in err] == []


def test_a_rank_twice_with_other_bytes_is_refused(gather, nodes, tmp_path):
    log = nodes[1] / "rank_1_metrics.jsonl"
    log.write_bytes((nodes[0] / "rank_1_metrics.jsonl").read_bytes() + b"\n")
    refused(gather(*nodes), "rank_1_metrics.jsonl is in", nodes[0], nodes[1], "other content")
    assert leftovers(tmp_path) == []


def test_two_runs_are_refused(gather, nodes, tmp_path):
    other = node(tmp_path / "n2", (2, 3), run_id="run-2")
    refused(gather(nodes[0], other), "two runs", "'run-1'", "'run-2'", nodes[0], other)
    assert not (tmp_path / "both").exists()


def test_the_manifest_of_another_run_is_refused(gather, nodes):
    write_manifest(nodes[0], run_id="run-9", world_size=4)
    refused(gather(*nodes), "run.json", "'run-9'")


def test_worlds_of_different_size_are_refused(gather, nodes, tmp_path):
    refused(gather(nodes[0], node(tmp_path / "n2", (2, 3), world_size=8)), "a world of 8 ranks", "of 4")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_nothing_is_overwritten(gather, nodes, tmp_path, kind):
    into = tmp_path / "both"
    if kind == "folder":
        into.mkdir()
        (into / "mine").write_text("mine")
    else:
        into.write_text("mine")
    refused(gather(*nodes), "is there already and nothing is overwritten")
    assert (into / "mine" if kind == "folder" else into).read_text() == "mine"
    assert leftovers(tmp_path) == ["both"]


def test_an_empty_folder_may_be_filled(gather, nodes, tmp_path):
    (tmp_path / "both").mkdir()
    assert gather(*nodes)[0] == 0


def test_a_folder_that_is_not_there(gather, nodes, tmp_path):
    refused(gather(nodes[0], tmp_path / "gone"), "gone", "No such file")
    assert leftovers(tmp_path) == []


def test_a_folder_without_a_run(gather, nodes, tmp_path):
    (tmp_path / "n1" / "empty").mkdir()
    refused(gather(nodes[0], tmp_path / "n1" / "empty"), "nothing of a run here", "training.output_dir")


def test_a_record_that_cannot_be_read_is_kept_and_its_rank_missing(gather, nodes, tmp_path):
    (nodes[1] / "rank_3_metrics.jsonl").write_text("not a record")
    code, out, err = gather(*nodes)
    assert code == 5
    assert "rank_3_metrics.jsonl" in out
    assert "no record of rank 3 of 4" in err
    assert (tmp_path / "both" / "rank_3_metrics.jsonl").read_text() == "not a record"


def test_only_records_that_cannot_be_read(gather, tmp_path):
    (tmp_path / "n0").mkdir()
    (tmp_path / "n0" / "rank_0_metrics.jsonl").write_text("")
    refused(gather(tmp_path / "n0"), "no record of any rank can be read")


def test_more_is_taken_where_it_is_asked_for(gather, nodes, tmp_path):
    (nodes[1] / "my_traces" / "deep").mkdir(parents=True)
    (nodes[1] / "my_traces" / "deep" / "rank2.json").write_text("{}")
    assert gather(*nodes, also=["my_traces"])[0] == 0
    assert (tmp_path / "both" / "my_traces" / "deep" / "rank2.json").read_text() == "{}"
    assert not (tmp_path / "both" / "checkpoints").exists()


def test_a_url_serves_as_well(gather, nodes, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.put(str(nodes[1]), "/gathering-test/n1", recursive=True)
    try:
        assert gather(nodes[0], "memory://gathering-test/n1")[0] == 0
    finally:
        memory.rm("/gathering-test", recursive=True)
    assert contents(tmp_path / "both") == wanted(nodes[0]) | wanted(nodes[1])


def test_a_url_that_nothing_can_open(gather, nodes):
    refused(gather(nodes[0], "nosuch://host/x"), "nosuch://host/x")


@pytest.mark.parametrize(
    ("word", "url"),
    [
        ("node0:/scratch/run", "sftp://node0/scratch/run"),
        ("me@node-0.site:/x", "sftp://me@node-0.site/x"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("/local/path", "/local/path"),
        ("relative/a:b", "relative/a:b"),
    ],
)
def test_a_host_and_a_path_mean_sftp(word, url):
    assert url_of(word) == url


def test_what_a_server_lists_outside_of_its_folder_is_not_written(gather, nodes, tmp_path, monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.put(str(nodes[1]), "/gathering-test/n1", recursive=True)
    hostile = ["/gathering-test/n1/logs/../../../evil", "/evil"]
    find = type(memory).find
    monkeypatch.setattr(type(memory), "find", lambda self, path, **more: [*find(self, path, **more), *hostile])
    try:
        assert gather(nodes[0], "memory://gathering-test/n1")[0] == 0
    finally:
        monkeypatch.undo()
        memory.rm("/gathering-test", recursive=True)
    assert contents(tmp_path / "both") == wanted(nodes[0]) | wanted(nodes[1])


def test_the_folders_taken_are_those_that_a_run_writes():
    assert (LOG_DIR, TRACE_DIR) == FOLDERS


def test_numbers_in_short():
    assert number_ranges([0]) == "0"
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def command(script, *words):
    done = finished([sys.executable, str(ROOT / "analysis" / script), *map(str, words)])
    return done.returncode, done.stdout, done.stderr


def train_on_nodes(*folders):
    """Train as one launch of a node of one rank for each folder; what the first node wrote to stderr."""
    words = [str(ROOT / "train.py"), *SMALL, "label=both", "profiling.enabled=true", "profiling.wait=1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(folders)), "--nproc_per_node", "1"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    nodes = [
        subprocess.Popen(
            [*launcher, "--node_rank", str(number), *words, f"training.output_dir={folder}"],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    try:
        errors = [node.communicate(timeout=HANGS_S)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0] * len(folders), errors
    return errors[0]


@pytest.mark.dist
@pytest.mark.thorough
@pytest.mark.spec("B13")
def test_two_nodes_without_a_shared_disk_become_one_run(tmp_path):
    folders = [tmp_path / "node0", tmp_path / "node1"]
    errors = train_on_nodes(*folders)
    (line,) = [line for line in errors.splitlines() if "profiling: 2 file(s) of 2 rank(s)" in line]
    for rank, folder in enumerate(folders):
        assert [path.name for path in (folder / "both").glob("rank_*")] == [f"rank_{rank}_metrics.jsonl"]
        header = record(folder / "both", rank).header
        assert (header.local_rank, header.node_rank) == (0, rank)
        assert f"1 on node {rank} (" in line
        assert f", rank {rank} in {folder / 'both' / 'torch_profiler'}" in line
    (row,) = json.loads((folders[0] / "both" / "run.json").read_text())["traces"]["saved_traces"]
    # Below the folder of this run.json; a path that is elsewhere is absolute.
    assert row["paths"][0].startswith("torch_profiler/rank0/")
    assert row["paths"][1].startswith(str(folders[1] / "both" / "torch_profiler" / "rank1"))
    merged = ["-o", str(tmp_path / "merged.json"), "--check"]
    assert merge_traces([*(str(folder / "both") for folder in folders), *merged]) == 0
    into = tmp_path / "gathered"
    code, out, err = command("gather.py", "--into", into, *(folder / "both" for folder in folders))
    assert code == 0, err
    assert "2 of 2 ranks" in out
    run_id = json.loads((into / "run.json").read_text())["run_id"]
    assert [record(into, rank).header.run_id for rank in (0, 1)] == [run_id, run_id]
    assert all(any((into / "torch_profiler" / f"rank{rank}").iterdir()) for rank in (0, 1))
    report = tmp_path / "report"
    code, _, err = command("overlap_report.py", "--log-dir", into, "--label", "both", "--output", report)
    assert code == 0, err
    entry = json.loads((report / "summary.json").read_text())["datasets"]["both"]
    assert entry["health"]["ranks_missing"] == []
    # What needs every rank is there: collectives matched across the two nodes.
    assert entry["metrics"]["job_step_ms"]["median"] > 0
    assert any(row["transfer_ms"]["median"] is not None for row in entry["collectives"])
    # One node alone: the report is not whole, and the command that gathers says so.
    code, _, err = command("gather.py", "--into", tmp_path / "half", folders[0] / "both")
    assert code == 5
    assert "no record of rank" in err
    assert any((tmp_path / "half").iterdir())
