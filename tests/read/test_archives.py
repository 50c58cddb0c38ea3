"""Archives of run folders: read like the folders they hold, unpacked nowhere but below one temporary folder."""

from __future__ import annotations

import gc
import io
import os
import shlex
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import aorta.analysis
from aorta.errors import InputError
from aorta.read import locations as module
from aorta.read.locations import Archives
from aorta.report.command import overlap_report
from aorta.whatif import whatif_command
from tests.analysis.builders import simulated_run, strict_json
from tests.whatif.simulated_job import Job
from tests.whatif.simulated_record import record

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made; to be found empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def tar(path: Path, folder: Path, inside: str, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        archive.add(folder, arcname=inside)
    return path


def zipped(path: Path, folder: Path, inside: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in folder.rglob("*"):
            archive.write(file, Path(inside, file.relative_to(folder)))
    return path


PACKED: dict[str, Callable[[Path, Path], Path]] = {
    "run.tar.gz": lambda path, folder: tar(path, folder, "run"),
    "run.tgz": lambda path, folder: tar(path, folder, "."),
    "run.tar": lambda path, folder: tar(path, folder, "home/me/artifacts/run", "w"),
    "run.zip": lambda path, folder: zipped(path, folder, "run"),
    "no-suffix": lambda path, folder: tar(path, folder, "run"),
}


def report(words: list[str], output: Path) -> dict:
    assert overlap_report([*words, "--no-html", "--output", str(output)]) == 0
    return strict_json(output / "summary.json")


def test_what_a_report_says_to_ask_can_be_asked_of_the_archive(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(Job("ddp", ranks=2, steps=12), tmp_path / "run")
    archive = tar(tmp_path / "run.tar.gz", tmp_path / "run", "run")
    told = report(["--log-dir", str(archive), "--label", "x"], tmp_path / "packed")["datasets"]["x"]["what_if"]
    program, command, *words = shlex.split(told["command"])
    assert (program, command, words[0]) == ("aorta", "whatif", f"{archive}!run")
    capsys.readouterr()
    assert whatif_command.main(words) == 0
    assert f"with {told['gains'][0]['change']}:" in capsys.readouterr().out
    assert whatif_command.main([str(archive)]) == 0
    assert told["gains"][0]["name"] in capsys.readouterr().out
    assert whatif_command.main([f"{archive}!other"]) == 2
    assert "run.tar.gz!other: the archive has no folder 'other'" in capsys.readouterr().err
    assert not any(temporary.iterdir())


@pytest.mark.thorough
@pytest.mark.spec("D42")
@pytest.mark.parametrize("name", PACKED)
def test_an_archive_of_a_run_gives_the_numbers_of_its_folder(
    name: str, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = simulated_run(tmp_path / "run", label="own", ranks=2, steps=5, warmup=1)
    (folder / "history").mkdir()
    (folder / "history" / "rank_0_metrics.jsonl").write_text("an earlier run\n")
    archive = PACKED[name](tmp_path / name, folder)
    packed = report(["--log-dir", str(archive), "--label", "x"], tmp_path / "packed")["datasets"]["x"]
    said = capsys.readouterr().out
    plain = report(["--log-dir", str(folder), "--label", "x"], tmp_path / "plain")["datasets"]["x"]
    assert packed["source"].pop("path").startswith(str(archive))
    assert plain["source"].pop("path") == str(folder)
    assert packed == plain
    assert str(temporary) not in said
    assert list(temporary.iterdir()) == []


def test_an_archive_of_a_launch_set_is_one(tmp_path: Path, temporary: Path) -> None:
    for number in range(2):
        simulated_run(tmp_path / "set" / f"0{number}", label=f"n{number}", ranks=1, steps=4, warmup=1, seed=number)
    archive = tar(tmp_path / "set.tar.gz", tmp_path / "set", "set")
    summary = report(["--log-dir", str(archive), "--label", "x"], tmp_path / "out")
    entry = summary["datasets"]["x"]
    assert (entry["launches"], entry["launch_set"]) == (2, f"{archive}!set")
    assert entry["representative"] in {f"{archive}!set/00", f"{archive}!set/01"}
    assert list(temporary.iterdir()) == []


def test_the_tables_of_an_archive_and_its_copy_is_removed_with_the_run(tmp_path: Path, temporary: Path) -> None:
    folder = simulated_run(tmp_path / "run", label="own", ranks=2, steps=5, warmup=1)
    archive = tar(tmp_path / "run.tar.gz", folder, "run")
    assert aorta.analysis.steps(archive).equals(aorta.analysis.steps(folder))
    run = aorta.analysis.load_run(archive)
    assert run.ranks[0].details.step(0).segments  # read from the disk again
    assert len(list(temporary.iterdir())) == 1
    del run
    gc.collect()
    assert list(temporary.iterdir()) == []


def hostile(path: Path, name: str, data: bytes = b"{}", kind: bytes = tarfile.REGTYPE, link: str = "") -> Path:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(data), kind, link
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(member, io.BytesIO(data))
    return path


def test_nothing_is_written_outside(tmp_path: Path, temporary: Path) -> None:
    record = "rank_0_metrics.jsonl"
    with zipfile.ZipFile(tmp_path / "up.zip", "w") as archive:
        archive.writestr(f"../{record}", "{}")
    cases = {
        "up.zip": "outside of its archive",
        hostile(tmp_path / "up.tar.gz", f"../{record}").name: "outside of its archive",
        hostile(tmp_path / "root.tar.gz", f"{tmp_path}/{record}").name: "outside of its archive",
        hostile(tmp_path / "link.tar.gz", record, b"", tarfile.SYMTYPE, "/etc/passwd").name: "a link or a device",
        hostile(tmp_path / "fifo.tar.gz", record, b"", tarfile.FIFOTYPE).name: "a link or a device",
    }
    before = sorted(tmp_path.rglob("*"))
    for name, words in cases.items():
        with Archives() as archives, pytest.raises(InputError, match=f"{name}.*{words}"):
            archives.folder_of(tmp_path / name)
        assert sorted(tmp_path.rglob("*")) == before


def test_what_is_larger_than_any_run_is_refused_and_removed(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LARGEST_BYTES", 1 << 21)
    monkeypatch.setattr(module, "_MOST_FILES", 3)
    large = hostile(tmp_path / "large.tar.gz", "rank_0_metrics.jsonl", b" " * (1 << 22))
    for number in range(4):
        simulated_run(tmp_path / "set" / str(number), label="x", ranks=1, steps=2, warmup=0)
    for archive in (large, tar(tmp_path / "many.tar.gz", tmp_path / "set", "set")):
        assert overlap_report(["--log-dir", str(archive), "--label", "x"]) == 2
        with Archives() as archives, pytest.raises(InputError, match="more than 3 files or"):
            archives.folder_of(archive)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("name", ["zeros.zip", "zeros.tar"])
def test_a_bomb_is_refused_in_zip_and_in_sparse_members_too(
    name: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INFLATED_LIMIT", 1 << 21)
    if name.endswith("zip"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("rank_0_metrics.jsonl", bytes(1 << 24))
    else:
        with (tmp_path / "rank_0_metrics.jsonl").open("wb") as file:
            file.truncate(1 << 24)
        words = ["tar", "--sparse", "--format=gnu", "-cf", name, "rank_0_metrics.jsonl"]
        subprocess.run(words, cwd=tmp_path, check=True)
        assert (tmp_path / name).stat().st_size < 1 << 15
    with Archives() as archives, pytest.raises(InputError, match="no record is compressed that far"):
        archives.folder_of(tmp_path / name)
    assert list(temporary.iterdir()) == []


def test_damage_is_an_error_with_the_archives_name(tmp_path: Path, temporary: Path) -> None:
    folder = simulated_run(tmp_path / "run", label="own", ranks=1, steps=40, warmup=1)
    for whole in (tar(tmp_path / "cut.tar.gz", folder, "run"), zipped(tmp_path / "cut.zip", folder, "run")):
        os.truncate(whole, whole.stat().st_size * 2 // 3)
        with Archives() as archives, pytest.raises(InputError, match=whole.name):
            archives.folder_of(whole)
    (folder / "rank_0_metrics.jsonl").write_text("not a record\n")
    broken = tar(tmp_path / "broken.tar.gz", folder, "run")
    with pytest.raises(InputError, match=r"broken\.tar\.gz!run: its record cannot be read"):
        aorta.analysis.load_run(broken)
    gc.collect()
    assert list(temporary.iterdir()) == []
