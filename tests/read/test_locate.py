"""Labels and the folders they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.errors import InputError
from aorta.read.locate import check_label, is_location, labels_of, locate
from tests.analysis.builders import header, write_rank


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.mark.spec("D42")
def test_the_order_of_the_search(here: Path, root: Path) -> None:
    places = [
        root / "artifacts",
        root / "artifacts" / "cuda",
        root / "artifacts_cuda" / "cuda",
        root / "artifacts_cuda",
        here / "artifacts",
        here / "artifacts" / "cuda",
        here / "artifacts_cuda" / "cuda",
        here / "artifacts_cuda",
    ]
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
        for place in (here, root):
            assert f"  {place / f'artifacts_{label}'}  " in message
            assert f"  {place / 'artifacts' / label}  " in message
    assert message.count(f"  {here / 'artifacts'}  ") == 1


def test_history_and_unreadable_records_do_not_serve(here: Path, root: Path) -> None:
    write_rank(here / "artifacts" / "cuda" / "history" / "old", header(label="cuda"), [])
    (here / "artifacts" / "rank_0_metrics.jsonl").write_text("not a record\n")
    with pytest.raises(InputError, match="no records for 'cuda'"):
        locate(["cuda"], here, root)


def test_a_first_line_that_does_not_say_that_it_is_a_header_is_none(here: Path, root: Path) -> None:
    path = write_rank(here / "artifacts", header(label="cuda"), [])
    assert locate(["cuda"], here, root) == {"cuda": here / "artifacts"}
    path.write_text(path.read_text().replace('"record":"header",', "", 1))
    with pytest.raises(InputError, match="no records for 'cuda'"):
        locate(["cuda"], here, root)


@pytest.mark.parametrize("label", ["", ".", "..", ".hidden", "../up", "a/b", "a b", "a\n", "naïve", "a" * 101])
def test_labels_that_cannot_name_a_file_are_refused(label: str, here: Path) -> None:
    with pytest.raises(InputError, match="letters, digits and"):
        check_label(label)
    with pytest.raises(InputError):
        locate([label], here, here)


@pytest.mark.parametrize("label", ["cuda", "mi300x-2.13_nightly", "0", "_a", "-a"])
def test_labels_that_can(label: str) -> None:
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


def test_nothing_found_says_that_there_is_no_such_path_either(here: Path, root: Path) -> None:
    with pytest.raises(InputError) as caught:
        locate(["cuda"], here, root)
    assert f"  {here / 'cuda'}  (not there)" in str(caught.value)
    assert "no records)" not in str(caught.value)


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
