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
    """Nothing is built there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def test_without_it_the_reason_is_said_and_nothing_fails(somewhere_else: Path) -> None:
    not_built = f"python: not built; {native.BUILD_COMMAND} does it"
    assert native.compiled(CPU, wanted=True, emulated=False) == (None, not_built)
    assert native.interceptor_for(CPU, "observe", wanted=True, emulated=False) == {"interceptor": not_built}
    Instrumentation(CPU, "observe", 0, 1, read_clocks(), lambda step: None, native=True).close()


def test_where_it_is_not_used() -> None:
    assert native.compiled(CPU, wanted=False, emulated=False) == (None, "python: instrument.native=false")
    assert native.compiled(CPU, wanted=True, emulated=True) == (None, "python: the fabric is emulated")
    assert native.interceptor_for(CPU, "off", wanted=True, emulated=False) == {}


def test_a_device_whose_streams_cannot_be_asked_whether_they_are_captured_is_not_looked_at() -> None:
    if native.load()[0] is None:
        pytest.skip(f"the compiled interceptor: {native.load()[1]}")
    module, why = native.compiled(torch.device("xpu"), wanted=True, emulated=False)
    assert module is None
    assert re.fullmatch(rf"none: torch {re.escape(torch.__version__)} on xpu: \S.+", why)


def test_a_library_of_another_build_is_left_alone(somewhere_else: Path) -> None:
    path = native.library()
    path.parent.mkdir()
    path.write_bytes(b"no library")
    module, why_not = native.load()
    assert module is None
    assert str(path) in str(why_not)


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
    assert native.compiled(CPU, wanted=True, emulated=False) == (None, f"python: cannot be looked for: {error}")
    assert main() == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_build_that_fails_says_so(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (somewhere_else / "aorta").write_text("a file where the folder should be")
    assert main() in (1, 127)  # 127: no compiler on this machine
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")  # torch may have warned before
    assert native.compiled(CPU, wanted=True, emulated=False)[1].startswith("python: cannot be looked for: [Errno 20]")


def test_no_compiler(somewhere_else: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ToolMissing, match=r"c\+\+ not found"):
        native.build()
    assert main() == 127
    assert "Install g++" in capsys.readouterr().err
    assert list(somewhere_else.rglob("*.so")) == []


def asked_to_build(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let runs build, with this text in place of the compiler's work: it is run with the library's path."""
    monkeypatch.delenv(native.FIRST_USE, raising=False)
    monkeypatch.setenv("CXX", sys.executable)  # one that is there
    code = f"import os, sys; path = {str(native.library())!r}; {program}"
    monkeypatch.setattr(native, "_BUILD", (sys.executable, "-c", code))


def test_the_first_run_builds_it_once_whatever_the_number_of_ranks(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_to_build(monkeypatch, "open('runs', 'a').write('x'); __import__('time').sleep(0.3); open(path, 'w').close()")
    monkeypatch.chdir(somewhere_else)
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(lambda _: native.ensure_built("observe", wanted=True, emulated=False), range(4)))
    assert (native.library().exists(), (somewhere_else / "runs").read_text()) == (True, "x")


def test_a_build_outlives_the_run_that_began_it(somewhere_else: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = "import time; open('runs', 'a').write('x'); time.sleep(1); open(path, 'w').close()"
    asked_to_build(monkeypatch, builds)
    monkeypatch.chdir(somewhere_else)
    run = os.fork()
    if run == 0:
        os.setsid()
        threading.Thread(
            target=native.ensure_built, args=("observe",), kwargs={"wanted": True, "emulated": False}
        ).start()
        while not (somewhere_else / "runs").exists():
            time.sleep(0.01)
        os.killpg(0, signal.SIGKILL)  # as torchrun ends a rank
    os.waitpid(run, 0)
    assert not native.library().exists()
    native.ensure_built("observe", wanted=True, emulated=False)
    assert native.library().exists()
    assert (somewhere_else / "runs").read_text() == "x"


def test_a_build_that_fails_in_a_run_is_said_and_not_repeated(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_to_build(monkeypatch, "open('runs', 'a').write('x'); sys.exit('no headers')")
    monkeypatch.chdir(somewhere_else)
    for _ in range(2):
        native.ensure_built("observe", wanted=True, emulated=False)
    assert (somewhere_else / "runs").read_text() == "x"
    said = f"python: could not be built: exit code 1: no headers; {native.BUILD_COMMAND} tries again"
    assert native.compiled(CPU, wanted=True, emulated=False) == (None, said)


@pytest.mark.parametrize(
    ("mode", "wanted", "emulated", "variable"),
    [
        ("off", True, False, "1"),
        ("observe", False, False, "1"),
        ("observe", True, True, "1"),
        ("observe", True, False, "0"),
    ],
)
def test_nothing_is_built_that_a_run_does_not_use(
    somewhere_else: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: InstrumentMode,
    wanted: bool,
    emulated: bool,
    variable: str,
) -> None:
    asked_to_build(monkeypatch, "open(path, 'w').close()")
    monkeypatch.setenv(native.FIRST_USE, variable)
    native.ensure_built(mode, wanted=wanted, emulated=emulated)
    assert not native.library().parent.exists()


def test_without_a_compiler_what_is_missing_is_named(somewhere_else: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.FIRST_USE, raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    native.ensure_built("observe", wanted=True, emulated=False)
    _, why = native.compiled(CPU, wanted=True, emulated=False)
    assert why == f"python: not built: c++ not found, which g++ brings; {native.BUILD_COMMAND} does it"
