"""Files that are written appear whole, together, and in no place of another; every writer of AORTA does it so."""

from __future__ import annotations

import ast
import errno
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from aorta.records.files import whole_file

AORTA = Path(__file__).resolve().parents[2] / "aorta"
OTHERWISE = {
    "analysis/gate.py": "appends to a file of continuous integration",
    "analysis/load/locations.py": "unpacks into a temporary folder",
    "analysis/load/open.py": "copies into a temporary folder",
    "analysis/report/pictures.py": "writes to the path that the report gives it",
    "analysis/report/html/page_content.py": "writes to the path that the report gives it",
    "analysis/table_files.py": "writes to the path that the report gives it",
    "autopsy/processes.py": "a file that stays open, for a process that may die",
    "command_line.py": "a file of torchrun's",
    "distributed/output_folder.py": "a lock",
    "experiments/journal.py": "appends lines",
    "experiments/process.py": "the log of another process",
    "instrument/emulation/network.py": "a lock, and memory that is shared",
    "instrument/native/build.py": "a lock",
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


def test_every_file_is_written_whole() -> None:
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


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_takes_no_name_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        without_links(monkeypatch)
    for content in ("first", "second"):
        with ExitStack() as stack:
            if content == "second":
                stack.enter_context(pytest.raises(FileExistsError))
            with whole_file(tmp_path / "a.json", new=True) as part:
                part.write_text(content)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "first")]


def test_files_of_one_stack_appear_together_or_not_at_all(tmp_path: Path) -> None:
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
