"""setup.sh where it does not install: a ready environment, none that can be made, an argument it does not know."""

from __future__ import annotations

import re
import shutil
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.scripts.conftest import ROOT, ready

CONSTRAINTS = ROOT / "constraints.txt"


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
    result = sh("setup.sh", "--dev")
    assert result.code == 0, result.err
    installs = [call["argv"] for call in result.calls if "install" in call["argv"]]
    assert installs[-1][-3:] == [str(sh.repo / ".venv/torch.txt"), "-e", ".[dev,dask]"]
    assert result.out.splitlines()[-1] == str(sh.repo / ".venv/bin/python")
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
    for _ in range(2):
        result = sh("setup.sh", "--dev", STANDIN_FAIL_ON="install", STANDIN_EXIT="1")
        assert (result.code, result.out) == (1, "")
        assert "pip could not install" in result.err or "found no Python" in result.err
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


def test_an_unknown_argument_is_refused(sh):
    result = sh("setup.sh", "--develop")
    allowed = "--dev, --offline DIR, --wheels DIR [--python 3.12] [--without FILE]"
    assert (result.code, result.err) == (1, f"setup.sh: unknown argument '--develop'; allowed: {allowed}\n")


def test_the_demo_is_the_command_after_set_up(sh, repo):
    ready(sh, repo, "run")
    result = sh("demo.sh", "training.max_steps=3", STANDIN_EXIT="5", STANDIN_FAIL_ON="training.max_steps=3")
    (call,) = result.calls
    assert call["argv"] == ["-m", "aorta", "demo", "training.max_steps=3"]
    assert call["cwd"] == str(repo)
    assert result.code == 5


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.12.0", "3.13.0"])
def test_the_pins_are_a_resolution_for_every_supported_python(python):
    """Followed from AORTA's own requirements: all that this Python asks for is pinned, in a version that suits all."""
    variables = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    pins = dict(re.findall(r"^([\w.-]+)==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [("aorta", line, "") for part in ("dev", "dask") for line in extras[part]]
    todo += [("aorta", line, "") for line in project["dependencies"]]
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
