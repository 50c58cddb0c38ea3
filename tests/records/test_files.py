"""Files that are written appear whole, together, and in no place of another; every writer of AORTA does it so. Names of
a run folder's files; hosts without a known key are refused.
"""

from __future__ import annotations

import ast
import errno
import gzip
import json
import os
import re
import sys
import tarfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import fsspec
import pytest

from aorta.errors import ConfigError, InputError
from aorta.profiling.upload import Destination
from aorta.read.traces import files
from aorta.read.traces import open as load_open
from aorta.read.traces.files import NoTraces, find_units, read_unit
from aorta.read.traces.open import is_url, opened
from aorta.records.files import open_own, whole_file
from aorta.records.run_files import RANK_FILE, RANK_FILE_NAME, rank_files, read_manifest

AORTA = Path(__file__).resolve().parents[2] / "aorta"
OTHERWISE = {
    "report/text.py": "appends to a file of continuous integration",
    "read/traces/open.py": "copies into a temporary folder",
    "report/page/page_content.py": "writes to the path that the report gives it",
    "command_line.py": "a file of torchrun's",
    "recording/zero_lines.py": "adds a line to the note of aorta record",
    "profiling/trace_saver.py": "asks the disk why a trace is not whole",
}
MODES = frozenset("abrtwx+")


def written(call: ast.Call) -> str | None:
    """The expression that a call writes to; None where it writes no file."""
    if not isinstance(call.func, ast.Attribute):
        return None
    words = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    opens = call.func.attr == "open" and any(set(word) & set("awx+") and set(word) <= MODES for word in words)
    if opens or call.func.attr in ("write_text", "write_bytes", "savefig"):
        return ast.unparse(call.func.value)
    return None


def test_every_file_is_written_whole():
    found = {
        (str(path.relative_to(AORTA)), place)
        for path in AORTA.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and (place := written(node)) is not None
    }
    assert {
        row for row in found if row[0] not in OTHERWISE and "part" not in row[1] and "whole_file" not in row[1]
    } == {
        ("records/files.py", "path")  # reserves a name
    }
    assert set(OTHERWISE) <= {name for name, _ in found}


OTHERS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic link": lambda path, target: path.symlink_to(target),
    "hard link": lambda path, target: path.hardlink_to(target),
    "link to nothing": lambda path, target: path.symlink_to(target.with_name("nothing")),
    "pipe": lambda path, _target: os.mkfifo(path),
    "device": lambda path, _target: path.symlink_to(os.devnull),
    "link in a chain": lambda path, target: (path.with_name("b").symlink_to(target), path.symlink_to("b")),
}


@pytest.mark.parametrize("put", OTHERS.values(), ids=OTHERS)
def test_nothing_of_somebody_else_is_written_at_a_fixed_name(tmp_path, put):
    target, path = tmp_path / "theirs", tmp_path / "ours"
    target.write_text("content")
    put(path, target)
    with pytest.raises(OSError, match="which AORTA does not write to"):
        open_own(path)
    for content, new in ((b"new", True), (b"er", False)):  # what a file of ours holds stays
        with open_own(path, new=new) as file:
            file.write(content)
    assert (target.read_text(), path.read_bytes(), path.is_symlink()) == ("content", b"newer", False)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    "name", ["reference::x.json", "ddp::rank0.json.gz", "simplecache::memory:", "zip:", "memory::rank0.json", "a:b::c"]
)
def test_what_is_found_on_a_disk_is_a_path(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content = b'{"version": 1, "templates": {"u": "{{ 1 // 0 }}"}, "refs": {"a": "{{u}}"}}'
    Path(name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for place in (name, f"{tmp_path}/{name}", f"./{name}"):
        assert not is_url(place)
        with opened(place) as stream:
            assert stream.read() == content
    with pytest.raises(NoTraces, match=r"nothing that can be read as a trace \(" + re.escape(name)):
        find_units(".")
    with pytest.raises(NoTraces, match=re.escape(name)):
        find_units("*")


@pytest.mark.parametrize("address", json.loads(Path(__file__).with_suffix(".json").read_text())["refused addresses"])
def test_nothing_but_the_listed_file_systems_is_opened(address):
    with pytest.raises(InputError, match="no address that AORTA opens; its scheme is one of file, memory, s3,"):
        find_units(address)
    with pytest.raises(InputError, match="no address that AORTA opens"), opened(address):
        pass
    with pytest.raises(ConfigError, match=r"profiling.remote_root=.* no address that AORTA opens"):
        Destination(address)


def test_a_name_in_a_bucket_is_no_chain_of_file_systems(tmp_path):
    bucket = fsspec.filesystem("memory")
    (tmp_path / "secret").write_text("{}")
    bucket.pipe_file(f"/bucket/x::file://{tmp_path}/secret", b"{}")
    bucket.pipe_file("/bucket/rank0.json", b'{"traceEvents": []}')
    units, notes = find_units("memory://bucket")
    assert [unit.files for unit in units] == [("memory:///bucket/rank0.json",)]
    assert "no address that AORTA opens" in notes[0]


@pytest.mark.parametrize(
    "names",
    [
        ["a/" * 70],
        ["a/" * 900 + "b"],
        [f"{at}.json" for at in range(101)],
        [f"{at}/" for at in range(101)],
        ["a" * 5000],
    ],
    ids=["deep", "deep names", "many", "many folders", "long names"],
)
def test_names_and_folders_count_in_an_archive_and_a_folder(tmp_path, monkeypatch, names):
    monkeypatch.setattr(load_open, "MOST_NAMES", 100)
    monkeypatch.setattr(files, "MOST_NAMES", 100)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            member = tarfile.TarInfo(name.rstrip("/"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(member)
    (unit,), _ = find_units(str(tmp_path / "x.tar.gz"))
    with pytest.raises(InputError, match="files and folders, or 64 folders in each other"):
        list(read_unit(unit))
    if len(names[0]) == 5000:  # which no file system takes
        return
    for name in names:
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if name.endswith("/") else path.touch()
    with pytest.raises(InputError, match="files and folders, or 64 folders in each other"):
        find_units(str(tmp_path / "folder"))


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_takes_no_name_of_another(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))))
    for content in ("first", "second"):
        with nullcontext() if content == "first" else pytest.raises(FileExistsError):  # noqa: SIM117
            with whole_file(tmp_path / "a.json", new=True) as part, whole_file(tmp_path / "b") as other:
                assert part.name != other.name != "b"  # no name can be known before
                part.write_text(content)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "first")]


def test_files_of_one_stack_appear_together_or_not_at_all(tmp_path):
    names = ("a", "b", "c")
    (tmp_path / "a").write_text("before")

    def write(last: str) -> None:
        with ExitStack() as stack:
            for name in names:
                part = stack.enter_context(whole_file(tmp_path / name))
                if name == last:
                    raise OSError(errno.ENOSPC, "full")
                if name != "b":
                    part.write_text("after")

    with pytest.raises(OSError, match="full"):
        write("c")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]
    write("")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "after", "c": "after"}


def test_records_are_listed_by_rank_and_nothing_else_is(tmp_path):
    others = ("rank_x_metrics.jsonl", "rank_0_metrics.jsonl.bak", "rank__metrics.jsonl", "xrank_0_metrics.jsonl")
    for name in (*(RANK_FILE.format(rank=rank) for rank in (10, 9, 511)), *others, "run.json"):
        (tmp_path / name).touch()
    (tmp_path / RANK_FILE.format(rank=1)).mkdir()
    found = [RANK_FILE_NAME.match(path.name) for path in rank_files(tmp_path)]
    assert [int(name[1]) for name in found] == [9, 10, 511]
    assert [RANK_FILE_NAME.match(name) for name in others] == [None] * 4
    assert rank_files(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        (None, FileNotFoundError, "run.json"),
        (b"", ValueError, "truncated"),
        (b"{", ValueError, "truncated"),
        (b"[1]", ValueError, "Expected `object`, got `array`"),
        (b'{"a": "\xff"}', ValueError, "(?i)utf-8"),
        (b'{"a": ' + b"[" * 100_000, ValueError, "nested too deeply"),
    ],
    ids=["not there", "empty", "cut off", "a list", "not text", "deep"],
)
def test_a_manifest_is_read_as_it_was_written_or_refused_in_words(tmp_path, text, error, why):
    path = tmp_path / "run.json"
    path.write_text('{"run_id": "r", "schema_version": 7, "config": {"a": [1, null]}}')
    assert read_manifest(tmp_path) == {"run_id": "r", "schema_version": 7, "config": {"a": [1, None]}}
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(error, match=why):
        read_manifest(tmp_path)


KEY = "ssh-ed25519 AAAA"


class SSHException(Exception):
    pass


class Policy:
    """Of paramiko; `takes`: a host whose key is not known."""

    def __init__(self, takes=False):
        self.takes = takes


class SSHClient:
    def __init__(self):
        self._policy, self._known = Policy(), {}

    def set_missing_host_key_policy(self, policy):
        self._policy = policy

    def load_system_host_keys(self, path):
        self._known |= dict(line.split(" ", 1) for line in Path(path).read_text().splitlines())

    def connect(self, host, **_):
        if not self._policy.takes and self._known.get(host) != KEY:
            raise SSHException(f"Server {host!r}: its key is another, or not found in known_hosts")

    def open_sftp(self):
        return SimpleNamespace()


@pytest.fixture
def home(tmp_path, monkeypatch):
    paramiko, takes = ModuleType("paramiko"), partial(Policy, takes=True)
    paramiko.__dict__.update(SSHClient=SSHClient, SSHException=SSHException, MissingHostKeyPolicy=object)
    paramiko.__dict__.update(RejectPolicy=Policy, AutoAddPolicy=takes, WarningPolicy=takes)
    monkeypatch.setitem(sys.modules, "paramiko", paramiko)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    yield tmp_path
    del sys.modules["fsspec.implementations.sftp"], sys.modules["fsspec.implementations"].sftp
    for name in ("sftp", "ssh"):
        sys.modules["fsspec.registry"]._registry.pop(name, None)


@pytest.mark.parametrize("known", ["", "here ssh-ed25519 OTHER", f"here {KEY}"], ids=["unknown", "changed", "known"])
def test_a_host_without_its_known_key_is_refused(home, known):
    (home / ".ssh" / "known_hosts").write_text(known)
    if KEY in known:
        assert Destination("sftp://here/x").where("y") == "sftp://here/x/y"
        return
    for address in ("sftp://here/x", "simplecache::ssh://here/x"):
        with pytest.raises(ConfigError, match="log in once with ssh"):
            Destination(address)
        with pytest.raises(InputError, match="log in once with ssh"), opened(address):
            pass
