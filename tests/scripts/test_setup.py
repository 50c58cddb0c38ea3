"""setup.sh: a ready environment, none that can be made, an argument it does not know; and for a machine without a
network wheels that are fetched, and an environment that is made from them alone.

The repository of the latter is one of our own, of two small packages; its index cannot be reached.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.runs import environment, finished, succeeded
from tests.scripts.conftest import ROOT, ready


@pytest.mark.parametrize(("extras", "arguments"), [("run", []), ("dev", []), ("dev", ["--dev"])])
def test_a_ready_environment_is_only_named(sh, repo, extras, arguments):
    python = ready(sh, repo, extras)
    result = sh("setup.sh", *arguments)
    assert (result.code, result.out, result.err, result.calls) == (0, f"{python}\n", "", [])


@pytest.mark.parametrize("stale", ["pyproject.toml", "constraints.txt", "scripts/setup.sh", "extras"])
def test_a_change_in_what_it_was_made_from_makes_it_stale(sh, repo, stale):
    ready(sh, repo, "run" if stale == "extras" else "dev")
    if stale != "extras":
        with (repo / stale).open("a") as file:
            file.write("# changed\n")
    packages = repo / ".venv/lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    result = sh("setup.sh", "--dev")
    assert result.code == 0, result.err
    installs = [call["argv"] for call in result.calls if "install" in call["argv"]]
    assert installs[-1][-3:] == [str(sh.repo / ".venv/torch.txt"), "-e", ".[dev,dask]"]
    assert result.out.splitlines()[-1] == str(sh.repo / ".venv/bin/python")
    assert (packages / "checkout.pth").read_text() == f"{repo}\n", "found from the parent of the checkout too"
    assert sh("setup.sh", "--dev").calls == [], "the second call finds it ready"


@pytest.mark.parametrize("why", ["interrupted", "moved", "its python is gone"])
def test_an_environment_that_cannot_be_mended_is_made_again(sh, repo, why):
    ready(sh, repo)
    (repo / "pyproject.toml").write_text("# changed\n")
    if why == "interrupted":
        (repo / ".venv/unfinished").write_text("")
    elif why == "moved":
        sh.repo = repo.rename(repo.with_name("elsewhere"))
    else:
        (repo / ".venv/bin/python").unlink()
    # An interpreter that makes environments: it leaves a stand-in where the new one would be.
    (sh.repo / ".venv/leftover").write_text("")
    sh.standin("python3-inside", "torchrun.py")
    make = 'for place; do :; done; test "$1" = -m || exit 0; mkdir -p "$place/bin"; cp "$0-inside" "$place/bin/python"'
    sh.program("python3", make)
    (sh.bin / "cp").symlink_to(shutil.which("cp"))
    result = sh("setup.sh", "--dev", PYTHON="python3")
    assert result.code == 0, result.err
    assert [(sh.repo / ".venv" / name).exists() for name in ("leftover", "unfinished", "dev.stamp")] == [0, 0, 1]
    assert f'exec "{sh.repo}/.venv/bin/python" -m torch' in (sh.repo / ".venv/bin/torchrun").read_text()


def test_the_environment_of_another_checkout_is_not_emptied_through_a_link(sh, repo, tmp_path):
    ready(sh, repo)
    other = (repo / ".venv").rename(tmp_path / "other-venv")
    (repo / ".venv").symlink_to(other)
    (other / "dev.stamp").write_text("/another/checkout\n")
    result = sh("setup.sh", "--dev")
    assert (result.code, result.out) == (1, "")
    assert f"is a link to {other}, an environment that was not made for this checkout" in result.err
    assert (other / "bin/python").exists()
    (other / "dev.stamp").write_text(f"{repo}\nstale\n")
    assert sh("setup.sh", "--dev").code == 0, "a link to its own environment, on another disk, is as good as a folder"


def test_a_failed_install_says_so_and_is_not_taken_for_ready(sh, repo):
    ready(sh, repo, "run")
    for said in ("pip could not install", "found no Python"):
        result = sh("setup.sh", "--dev", STANDIN_FAIL_ON="install", STANDIN_EXIT="1")
        assert (result.code, result.out) == (1, "")
        assert said in result.err
    assert not list((repo / ".venv").glob("*.stamp"))


@pytest.mark.parametrize(("other", "tried"), [(None, "python3.13 python3.12 python3.11 python3"), ("exit 1", "mine")])
def test_without_a_python_it_says_what_to_do(sh, repo, other, tried):
    if other:
        sh.program("python3", "exit 0")
        sh.program("mine", other)  # asked for by name, it is not replaced by another
    result = sh("setup.sh", **({"PYTHON": "mine"} if other else {}))
    assert (result.code, result.out) == (1, "")
    assert f"found no Python >= 3.11 (tried {tried})" in result.err
    assert not (repo / ".venv").exists()


def test_the_demo_is_the_command_after_set_up(sh, repo):
    ready(sh, repo, "run")
    result = sh("demo.sh", "training.max_steps=3", STANDIN_EXIT="5", STANDIN_FAIL_ON="training.max_steps=3")
    assert result.code == 5
    assert (result.argv, result.calls[0]["cwd"]) == (["-m", "aorta", "demo", "training.max_steps=3"], str(repo))


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.12.0", "3.13.0"])
def test_the_pins_are_a_resolution_for_every_supported_python(python):
    """Followed from AORTA's own requirements: all that this Python asks for is pinned, in a version that suits all."""
    variables = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    pinned = re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pins = {canonicalize_name(name): version for name, version in pinned}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [("aorta", line, "") for line in (*project["dependencies"], *extras["dev"], *extras["dask"])]
    seen, wrong = set(), []
    while todo:
        whose, line, extra = todo.pop()
        asked = Requirement(line)
        name = canonicalize_name(asked.name)
        if asked.marker is not None and not asked.marker.evaluate(variables | {"extra": extra}):
            continue
        if name == "torch":  # scripts/setup.sh pins it, and what it brings is left as it is
            continue
        if name not in pins:
            wrong.append(f"{whose} needs {line}, which is not pinned")
        elif not asked.specifier.contains(pins[name], prereleases=True):
            wrong.append(f"{whose} needs {line}; pinned is {pins[name]}")
        for part in {"", *asked.extras} - {part for known, part in seen if known == name}:
            seen.add((name, part))
            found = next(metadata.distributions(name=name), None)
            if found is not None:
                todo += [(name, needed, part) for needed in found.requires or ()]
                if not SpecifierSet(found.metadata.get("Requires-Python") or "").contains(python):
                    wrong.append(f"{name} needs Python {found.metadata['Requires-Python']}")
    assert len({name for name, _ in seen}) > 100
    assert wrong == []


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
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", text)
        archive.writestr(f"{about}/METADATA", metadata + "".join(f"Requires-Dist: {need}\n" for need in needs))
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return path


@pytest.mark.thorough
def test_wheels_are_fetched_and_an_environment_is_made_of_them_without_an_index(tmp_path: Path) -> None:
    repository, index, base, wheels = (tmp_path / name for name in ("a repository", "index", "base", "the wheels"))
    shutil.copytree(ROOT / "scripts", repository / "scripts")
    (repository / "pyproject.toml").write_text(PROJECT)
    (repository / "constraints.txt").write_text("first==1.5\nsecond==1\n")
    index.mkdir()
    # All that there is: two versions of `first`, what it needs, and what nobody may take.
    for name, version in (("first", "2"), ("second", "1"), ("third", "1"), ("torch", "9")):
        wheel(index, name, version)
    wheel(index, "first", "1.5", "VALUE = 1", "third")
    wheel(index, "makes_wheels", "2", BACKEND)

    def setup(*words: str, **variables: str) -> str:
        own = {name: value for name, value in environment(**UNREACHABLE, **variables).items() if name != "PYTHONPATH"}
        return succeeded(finished(["bash", str(repository / "scripts/setup.sh"), *words], own=own)).stdout

    (tmp_path / "there.txt").write_text("Second==0.9\nmakes-wheels==1\nnumpy @ file:///x\n-e git+https://x#egg=x\n")
    words = ("--wheels", str(wheels), "--python", "3.12", "--without", str(tmp_path / "there.txt"))
    found = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PYTHON": sys.executable}
    assert setup(*words, **found) == f"{wheels}\n"
    # `second` is said to be there; what builds the package is needed anew, whatever is there.
    fetched = sorted(path.name.partition("-py3")[0] for path in wheels.iterdir())
    assert fetched == ["first-1.5", "makes_wheels-2", "third-1"]

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(base)], check=True)
    (packages,) = base.glob("lib/python*/site-packages")
    text = '__version__ = "2.11.0+cu130"'
    for there in (wheel(index, "torch", "2.11.0+cu130", text), index / "second-1-py3-none-any.whl"):
        with zipfile.ZipFile(there) as archive:
            archive.extractall(packages)
    python = setup("--offline", str(wheels), PYTHON=str(base / "bin/python")).splitlines()[-1]
    assert python == str(repository / ".venv/bin/python")
    asked = "import first, second, third, torch; print(first.VALUE, torch.__version__, torch.__file__, second.__file__)"
    told = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    assert told[:2] == ["1", "2.11.0+cu130"]
    assert all(path.startswith(str(base)) for path in told[2:]), "both are used where they were"


def test_without_torch_there_it_says_so_and_installs_none(sh, repo):
    ready(sh, repo, "run")
    (sh.home / "a.whl").touch()
    result = sh("setup.sh", "--dev", "--offline", str(sh.home), STANDIN_FAIL_ON="torch", STANDIN_EXIT="1")
    assert (result.code, [call for call in result.calls if "install" in call["argv"]]) == (1, [])
    assert "has no torch >= 2.11, which wheels do not bring. Install it, or name a Python that has it" in result.err
    assert not list((repo / ".venv").glob("*.stamp"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--develop"], "unknown argument '--develop'; allowed: --dev, --offline DIR, --wheels DIR [--python 3.12]"),
        (["--offline"], "--offline needs a value"),
        (["--offline", "/nowhere"], "--offline /nowhere: no wheels there. 'scripts/setup.sh --wheels DIR' fetches"),
        (["--wheels", "x", "--without", "/nowhere"], "--without /nowhere: cannot be read. It is what 'pip freeze'"),
    ],
)
def test_what_is_missing_or_unknown_is_named(sh, words, said):
    result = sh("setup.sh", *words)
    assert (result.code, result.out) == (1, "")
    assert f"setup.sh: {said}" in result.err
