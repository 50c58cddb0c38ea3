"""The compiled tap's library: where it lies, why it is not used, and life without it."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from aorta.errors import ToolMissing
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.native import build as native
from aorta.instrument.native.__main__ import main
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode

CPU = torch.device("cpu")


@pytest.fixture
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is built there; it is the current folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def why_not(device: torch.device = CPU, *, wanted: bool = True, emulated: bool = False) -> str:
    """Why it is not used on a device."""
    module, why = native.compiled(device, wanted=wanted, emulated=emulated)
    assert module is None
    return str(why)


def test_without_it_the_reason_is_said_and_nothing_fails(somewhere_else: Path) -> None:
    not_built = f"python: not built; {native.BUILD_COMMAND} does it"
    assert why_not() == not_built
    assert native.interceptor_for(CPU, "observe", wanted=True, emulated=False) == {"interceptor": not_built}
    Instrumentation(CPU, "observe", 0, 1, read_clocks(), lambda step: None, native=True).close()
    path = native.library()
    path.parent.mkdir()
    path.write_bytes(b"no library")  # of another build, which is left alone
    native.load.cache_clear()
    assert str(path) in why_not()


def test_where_it_is_not_used() -> None:
    assert why_not(wanted=False) == "python: instrument.native=false"
    assert why_not(emulated=True) == "python: the fabric is emulated"
    assert native.interceptor_for(CPU, "off", wanted=True, emulated=False) == {}
    if native.load()[0] is None:
        pytest.skip(f"the compiled interceptor: {native.load()[1]}")
    # A device whose streams cannot be asked whether they are captured is not looked at.
    assert re.fullmatch(rf"none: torch {re.escape(torch.__version__)} on xpu: \S.+", why_not(torch.device("xpu")))


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("no home directory")])
def test_a_home_that_cannot_be_looked_into_is_a_reason(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    if isinstance(error, OSError):
        monkeypatch.setattr(Path, "stat", fail)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", fail)
    assert why_not() == f"python: cannot be looked for: {error}"
    assert main() == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_build_that_fails_says_so(somewhere_else: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (somewhere_else / "aorta").write_text("a file where the folder should be")
    assert main() in (1, 127)  # 127: no compiler on this machine
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")  # torch may have warned before
    assert why_not().startswith("python: cannot be looked for: [Errno 20]")


def test_without_a_compiler_what_is_missing_is_named(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(native.FIRST_USE, raising=False)
    with pytest.raises(ToolMissing, match=r"c\+\+ not found"):
        native.build()
    assert main() == 127
    assert "Install g++" in capsys.readouterr().err
    assert list(somewhere_else.rglob("*.so")) == []
    ensure_built()
    assert why_not() == f"python: not built: c++ not found, which g++ brings; {native.BUILD_COMMAND} does it"


def ensure_built(mode: InstrumentMode = "observe", *, wanted: bool = True, emulated: bool = False) -> None:
    native.ensure_built(mode, wanted=wanted, emulated=emulated)


def asked_to_build(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let runs build, with this text in place of the compiler's work, which notes that it ran."""
    monkeypatch.delenv(native.FIRST_USE, raising=False)
    monkeypatch.setenv("CXX", sys.executable)  # one that is there
    code = f"import os, sys, time; path = {str(native.library())!r}; open('runs', 'a').write('x'); {program}"
    monkeypatch.setattr(native, "_BUILD", (sys.executable, "-c", code))


def test_the_first_run_builds_it_once_whatever_the_number_of_ranks(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_to_build(monkeypatch, "time.sleep(0.3); open(path, 'w').close()")
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(lambda _: ensure_built(), range(4)))
    assert (native.library().exists(), Path("runs").read_text()) == (True, "x")


def test_a_build_outlives_the_run_that_began_it(somewhere_else: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_to_build(monkeypatch, "time.sleep(1); open(path, 'w').close()")
    run = os.fork()
    if run == 0:
        os.setsid()
        threading.Thread(target=ensure_built).start()
        while not Path("runs").exists():
            time.sleep(0.01)
        os.killpg(0, signal.SIGKILL)  # as torchrun ends a rank
    os.waitpid(run, 0)
    assert not native.library().exists()
    ensure_built()
    assert (native.library().exists(), Path("runs").read_text()) == (True, "x")


def test_a_build_that_fails_in_a_run_is_said_and_not_repeated(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_to_build(monkeypatch, "sys.exit('no headers')")
    for _ in range(2):
        ensure_built()
    assert Path("runs").read_text() == "x"
    assert why_not() == f"python: could not be built: exit code 1: no headers; {native.BUILD_COMMAND} tries again"


@pytest.mark.parametrize(
    ("how", "variable"),
    [({"mode": "off"}, "1"), ({"wanted": False}, "1"), ({"emulated": True}, "1"), ({}, "0")],
    ids=["off", "not wanted", "emulated", "forbidden"],
)
def test_nothing_is_built_that_a_run_does_not_use(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], variable: str
) -> None:
    asked_to_build(monkeypatch, "open(path, 'w').close()")
    monkeypatch.setenv(native.FIRST_USE, variable)
    ensure_built(**how)
    assert not native.library().parent.exists()
