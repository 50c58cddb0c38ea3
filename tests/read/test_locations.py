"""Labels and the folders they mean, and folders of nodes that are one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aorta.errors import InputError
from aorta.merge.merge_traces import merge_traces
from aorta.read.locations import check_label, is_location, labels_of, locate
from aorta.report.command import overlap_report
from tests.analysis.builders import header, metrics, step, strict_json, write_manifest, write_rank
from tests.runs import HANGS_S, ROOT, SMALL, environment, free_port, record


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def root(here: Path) -> Path:
    return here.with_name("root")


@pytest.mark.spec("D42")
def test_the_order_of_the_search(here: Path, root: Path) -> None:
    below = ("artifacts", "artifacts/cuda", "artifacts_cuda/cuda", "artifacts_cuda")
    places = [folder / place for folder in (root, here) for place in below]
    for place in places:  # from the last searched to the first
        write_rank(place, header(label="cuda"), [])
        assert locate(["cuda"], here, root) == {"cuda": place}


def test_a_shared_folder_serves_by_label_or_platform_only(here: Path, root: Path) -> None:
    write_rank(root / "artifacts", header(label="mine", platform="rocm"), [])
    assert locate(["rocm"], here, root) == locate(["rocm"], root, root) == {"rocm": root / "artifacts"}
    assert locate(["mine"], here, root) == {"mine": root / "artifacts"}
    with pytest.raises(InputError, match=r"its records are labelled or made on mine, rocm"):
        locate(["cuda"], here, root)


def test_nothing_found_lists_each_path_and_the_commands(here: Path, root: Path) -> None:
    with pytest.raises(InputError) as caught:
        locate(["cuda", "rocm"], here, root)
    message = str(caught.value)
    for label in ("cuda", "rocm"):
        assert f"aorta train --nproc_per_node 2 label={label}" in message
        assert f"  {here / label}  (not there)" in message
        for place in (here, root):
            assert f"  {place / f'artifacts_{label}'}  " in message
            assert f"  {place / 'artifacts' / label}  " in message
    assert message.count(f"  {here / 'artifacts'}  ") == 1


def test_history_and_what_is_no_record_do_not_serve(here: Path, root: Path) -> None:
    write_rank(here / "artifacts" / "cuda" / "history" / "old", header(label="cuda"), [])
    path = write_rank(here / "artifacts", header(label="cuda"), [])
    assert locate(["cuda"], here, root) == {"cuda": here / "artifacts"}
    # A first line has to say that it is a header.
    for text in ("not a record\n", path.read_text().replace('"record":"header",', "", 1)):
        path.write_text(text)
        with pytest.raises(InputError, match="no records for 'cuda'"):
            locate(["cuda"], here, root)


@pytest.mark.parametrize("label", ["", ".", "..", ".hidden", "../up", "a/b", "a b", "a\n", "naïve", "a" * 101])
def test_labels_that_cannot_name_a_file_are_refused(label: str, here: Path) -> None:
    with pytest.raises(InputError, match="letters, digits and"):
        check_label(label)
    with pytest.raises(InputError):
        locate([label], here, here)


def test_labels_that_can() -> None:
    for label in ("cuda", "mi300x-2.13_nightly", "0", "_a", "-a"):
        assert check_label(label) == label


@pytest.mark.spec("D42")
def test_a_bare_name_is_a_label_first_and_then_a_path(here: Path, root: Path) -> None:
    for name in ("cuda", "my traces"):
        (here / name).mkdir()
    (here / "traces.tar.gz").touch()
    assert all(is_location(name, here, root) for name in ("cuda", "my traces", "traces.tar.gz", ".", "a/b", "s3::x"))
    assert not any(is_location(name, here, root) for name in ("rocm", "", "no such"))
    write_rank(here / "artifacts" / "cuda", header(label="cuda"), [])
    assert not is_location("cuda", here, root)


def test_runs_are_listed_by_themselves_and_launches_by_their_set_or_plan(here: Path, root: Path) -> None:
    runs = ("runs/a", "runs/set/00", "runs/set/01", "plan/reference/00", "plan/candidate-1/00", "01", ".hidden/a")
    for name in (*runs, "runs/a/history/old"):
        write_rank(here / name, header(), [])
    write_rank(root / "far" / "b", header(), [])
    (here / "linked").symlink_to(root / "far")
    with pytest.raises(InputError, match=r"Runs here: 01, linked/b, plan, runs/a, runs/set\n"):
        locate(["cuda"], here, root)


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        ("run_a/trace.json", "run_b/trace.json", ("run_a", "run_b")),
        ("/x/a/ddp/r.json.gz", "/x/b/ddp/r.json.gz", ("a", "b")),
        ("s3/a/*.json", "s3/b/*.json", ("a", "b")),
        ("one.json", "b/two.json", ("one", "two")),
        ("trace.json", "old/trace.json", ("trace", "trace")),
    ],
)
def test_sources_of_one_name_are_called_by_the_folder_that_differs(
    first: str, second: str, labels: tuple[str, str]
) -> None:
    assert labels_of(first, second) == labels


def node(folder: Path, ranks: tuple[int, ...], manifest: bool = False, **of: Any) -> Path:
    folder.mkdir(parents=True)
    for rank in ranks:
        steps = [step(rank, 4, number, overlap=metrics(10.0, 6.0, 4.0, 3.0)) for number in range(3)]
        write_rank(folder, header(rank, 4, node_rank=rank // 2, **of), steps)
    if manifest:
        write_manifest(folder, run_id="run-1", world_size=4)
    return folder


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[str, str]:
    """The node of rank 0 comes last."""
    return str(node(tmp_path / "n1" / "pair", (2, 3))), str(node(tmp_path / "n0" / "pair", (0, 1), manifest=True))


def report(tmp_path: Path, *words: str) -> dict[str, Any]:
    assert overlap_report([*words, "--output", str(tmp_path / "out"), "--no-html"]) == 0
    summary: dict[str, Any] = strict_json(tmp_path / "out" / "summary.json")
    return summary


def test_folders_of_one_run_are_one_run(nodes: tuple[str, str], tmp_path: Path) -> None:
    ((label, entry),) = report(tmp_path, *nodes)["datasets"].items()
    assert label == "pair"
    assert (entry["health"]["ranks_read"], entry["health"]["ranks_missing"]) == ([0, 1, 2, 3], [])
    assert entry["source"]["path"] == nodes[1]  # where run.json is
    assert entry["health"]["manifest_problem"] is None
    (entry,) = report(tmp_path, nodes[0])["datasets"].values()
    assert entry["health"]["ranks_missing"] == [0, 1]


@pytest.mark.parametrize("other", [{"run_id": "run-2"}, {"attempt": 1}])
def test_another_run_is_the_other_side(nodes: tuple[str, str], tmp_path: Path, other: dict[str, Any]) -> None:
    candidate = node(tmp_path / "candidate", (0, 1, 2, 3), **other)
    summary = report(tmp_path, *nodes, str(candidate))
    assert (summary["comparison"]["reference"], summary["comparison"]["candidate"]) == ("pair", "candidate")
    assert [len(entry["health"]["ranks_read"]) for entry in summary["datasets"].values()] == [4, 4]


def test_three_runs_are_too_many_and_a_rank_in_two_folders_is_refused(
    nodes: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [str(node(tmp_path / name, (0,), run_id=name)) for name in ("a", "b")]
    assert overlap_report([*nodes, *others]) == 2
    assert "3 sources: aorta report takes one, or a reference and a candidate" in capsys.readouterr().err
    twice = node(tmp_path / "twice", (1,))
    assert overlap_report([*nodes, str(twice)]) == 2
    said = capsys.readouterr().err
    assert f"{twice}/rank_1_metrics.jsonl" in said
    assert f"rank 1 is in {nodes[1]}/rank_1_metrics.jsonl too" in said


@pytest.mark.dist
@pytest.mark.thorough
@pytest.mark.spec("B13")
def test_two_nodes_without_a_shared_disk_are_one_run(tmp_path: Path) -> None:
    folders = [tmp_path / "node0", tmp_path / "node1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    words = [str(ROOT / "train.py"), *SMALL, "label=both", "profiling.enabled=true", "profiling.wait=1"]
    started = []
    for number, folder in enumerate(folders):
        own = [*launcher, "--node_rank", str(number), *words, f"training.output_dir={folder}"]
        started.append(subprocess.Popen(own, env=environment(), stderr=subprocess.PIPE, text=True))
    try:
        errors = [each.communicate(timeout=HANGS_S)[1] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0, 0], errors
    (line,) = [line for line in errors[0].splitlines() if "profiling: 2 file(s) of 2 rank(s)" in line]
    for rank, folder in enumerate(folders):
        assert [path.name for path in (folder / "both").glob("rank_*")] == [f"rank_{rank}_metrics.jsonl"]
        seen = record(folder / "both", rank).header
        assert (seen.local_rank, seen.node_rank) == (0, rank)
        assert f"1 on node {rank} (" in line
        assert f", rank {rank} in {folder / 'both' / 'torch_profiler'}" in line
    each = [str(folder / "both") for folder in folders]
    assert merge_traces([*each, "-o", str(tmp_path / "merged.json"), "--check"]) == 0
    (entry,) = report(tmp_path, *each)["datasets"].values()
    assert entry["health"]["ranks_missing"] == []
    # What needs every rank is there: collectives matched across the two nodes.
    assert entry["metrics"]["job_step_ms"]["median"] > 0
    assert any(row["transfer_ms"]["median"] is not None for row in entry["collectives"])
