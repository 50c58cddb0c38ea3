"""setup.sh for a machine without a network: wheels that are fetched, and an environment that is made from them alone.

The repository is one of our own, of two small packages; its index cannot be reached.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from tests.runs import HANGS_S, environment
from tests.scripts.conftest import ROOT

PROJECT = """\
[build-system]
requires = ["makes-wheels>=2"]
build-backend = "makes_wheels"

[project]
name = "small"
dependencies = ["torch>=2.11", "first>=1", "second"]
"""
BACKEND = """\
def build_editable(folder, config_settings=None, metadata_directory=None):
    import pathlib, zipfile
    metadata = "Metadata-Version: 2.1\\nName: small\\nVersion: 1\\n"
    metadata += "".join(f"Requires-Dist: {name}\\n" for name in ("torch>=2.11", "first>=1", "second"))
    with zipfile.ZipFile(pathlib.Path(folder, "small-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("small-1.dist-info/METADATA", metadata)
        wheel.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.dist-info/RECORD", "")
    return "small-1-py3-none-any.whl"
"""
UNREACHABLE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0"}
"""The port of `discard`, on which nothing listens."""


def wheel(folder: Path, name: str, version: str, text: str = "", *needs: str) -> Path:
    """Make one of a module."""
    files = {
        f"{name}.py": text,
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{name}-{version}.dist-info/RECORD"
    hashed = {path: urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for path, text in files.items()}
    rows = [f"{path},sha256={digest.decode().rstrip('=')},{len(files[path])}\n" for path, digest in hashed.items()]
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in (files | {record: "".join([*rows, f"{record},,\n"])}).items():
            archive.writestr(inside, text)
    return path


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("offline") / "a repository"
    shutil.copytree(ROOT / "scripts", repository / "scripts")
    (repository / "pyproject.toml").write_text(PROJECT)
    (repository / "constraints.txt").write_text("first==1.5\nsecond==1\n")
    return repository


@pytest.fixture(scope="module")
def index(repository: Path) -> Path:
    """All that there is: two versions of `first`, what it needs, and what nobody may take."""
    index = repository.parent / "index"
    index.mkdir()
    for name, version, *more in (
        ("first", "1.5", "VALUE = 1", "third"),
        ("first", "2"),
        ("second", "1"),
        ("third", "1"),
        ("torch", "9"),
        ("makes_wheels", "2", BACKEND),
    ):
        wheel(index, name, version, *more)
    return index


def setup(repository: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in environment(**UNREACHABLE, **variables).items() if name != "PYTHONPATH"}
    command = ["bash", str(repository / "scripts/setup.sh"), *words]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=HANGS_S, check=False)


@pytest.fixture(scope="module")
def wheels(repository: Path, index: Path) -> Path:
    """Fetched from the index; `second` is said to be there."""
    there = repository.parent / "there.txt"
    there.write_text("Second==0.9\nmakes-wheels==1\nnumpy @ file:///somewhere\n-e git+https://somewhere#egg=x\n")
    folder = repository.parent / "the wheels"
    done = setup(
        *(repository, "--wheels", str(folder), "--python", "3.12", "--without", str(there)),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(index),
        PYTHON=sys.executable,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}\n"
    assert "3 wheels, 0.0 MB, without torch" in done.stderr
    return folder


@pytest.mark.thorough
def test_wheels_are_those_of_the_pins_without_torch_and_without_what_is_there(wheels: Path) -> None:
    names = sorted(path.name.partition("-py3")[0] for path in wheels.iterdir())
    # What builds the package is needed anew, whatever is there.
    assert names == ["first-1.5", "makes_wheels-2", "third-1"]


@pytest.mark.thorough
def test_an_environment_is_made_without_an_index(repository: Path, wheels: Path, index: Path) -> None:
    base = repository.parent / "base"
    subprocess.run([sys.executable, "-m", "venv", str(base)], check=True)
    python = str(base / "bin/python")
    text = '__version__ = "2.11.0+cu130"'
    there = [wheel(index, "torch", "2.11.0+cu130", text), index / "second-1-py3-none-any.whl"]
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *map(str, there)]
    subprocess.run(install, check=True)
    done = setup(repository, "--offline", str(wheels), PYTHON=python)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(repository / ".venv/bin/python")
    asked = "import first, second, third, torch; print(first.VALUE, torch.__version__, torch.__file__, second.__file__)"
    told = subprocess.run([done.stdout.strip(), "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    assert told[:2] == ["1", "2.11.0+cu130"]
    assert all(path.startswith(str(base)) for path in told[2:]), "both are used where they were"


def test_without_torch_there_it_says_so_and_fetches_none(repository: Path, index: Path, tmp_path: Path) -> None:
    own = tmp_path / "repository"
    shutil.copytree(repository, own, ignore=shutil.ignore_patterns(".venv"))
    # One that has no packages at all: that of the operating system or of a build.
    bare = Path(sys.executable).resolve()
    if subprocess.run([bare, "-c", "import torch"], capture_output=True, check=False).returncode == 0:
        pytest.skip(f"{bare} has torch")
    done = setup(own, "--offline", str(index), PYTHON=str(bare))
    assert done.returncode == 1
    assert "has no torch >= 2.11, which wheels do not bring. Install it, or name a Python that has it" in done.stderr
    assert not list((own / ".venv").glob("*.stamp"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--offline"], "--offline needs a value"),
        (["--offline", "/nowhere"], "--offline /nowhere: no wheels there. 'scripts/setup.sh --wheels DIR' fetches"),
        (["--wheels", "x", "--without", "/nowhere"], "--without /nowhere: cannot be read. It is what 'pip freeze'"),
    ],
)
def test_what_is_missing_is_named(repository: Path, words: list[str], said: str) -> None:
    done = setup(repository, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"setup.sh: {said}" in done.stderr
