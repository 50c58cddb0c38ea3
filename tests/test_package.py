"""The package as people install it: a wheel, in a fresh environment, in an empty folder far from any checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from aorta.commands import COMMANDS
from tests.runs import HANGS_S, ROOT, SMALL, environment

OTHER_PYTHONS = [path for path in os.environ.get("AORTA_PYTHONS", "").split(os.pathsep) if path]
"""Interpreters of environments that have what AORTA depends on (CONTRIBUTING.md)."""
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
DATA = (
    "aorta/config/yaml/default.yaml",
    "aorta/config/yaml/experiment/full.yaml",
    "aorta/analysis/report/html/assets/page.html.jinja",
    "aorta/instrument/native/interceptor.cpp",
    "aorta/py.typed",
)


def run(*command: str, cwd: Path, home: Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in environment(HOME=str(home)).items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of what git knows, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    tree.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in files.decode().split("\0")[:-1]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    sdist = "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"
    name = run(sys.executable, "-c", sdist, cwd=tree, home=folder).stdout.split()[-1]
    wheel = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet")
    run(*wheel, "--wheel-dir", str(folder), str(tree / "dist" / name), cwd=folder, home=folder)
    (built,) = folder.glob("*.whl")
    return tree / "dist" / name, built


def environment_of(interpreter: str, wheel: Path, place: Path) -> Path:
    """The folder of programs of an environment that has the wheel, and of the interpreter's its dependencies."""
    run(interpreter, "-m", "venv", str(place), cwd=place.parent, home=place.parent)
    python = str(place / "bin" / "python")
    run(python, "-m", "pip", "install", "--no-deps", "--quiet", str(wheel), cwd=place, home=place)
    own = Path(run(python, "-c", PURELIB, cwd=place, home=place).stdout.strip())
    dependencies = run(interpreter, "-c", PURELIB, cwd=place, home=place).stdout
    (own / "dependencies.pth").write_text(dependencies)
    return place / "bin"


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of this interpreter."""
    return environment_of(sys.executable, distributions[1], tmp_path_factory.mktemp("environment") / "venv")


def test_the_distributions_hold_what_is_needed_and_nothing_stray(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert set(DATA) <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"aorta", "aorta_bench"}
    with tarfile.open(sdist) as packed_tar:
        tops = {member.name.split("/")[1] for member in packed_tar if "/" in member.name}
    assert not tops & {"artifacts", "reports", ".venv", "build", "dist"}


def test_every_command_explains_itself_and_gives_its_version(installed: Path, tmp_path: Path) -> None:
    overview = run(str(installed / "aorta"), "--help", cwd=tmp_path, home=tmp_path).stdout
    for name in COMMANDS:
        assert f"aorta {name}" in overview
        said = run(str(installed / "aorta"), name, "--help", cwd=tmp_path, home=tmp_path).stdout
        assert "xample" in said, f"aorta {name} --help shows no example"
    for words in (("--version",), ("train", "--version")):
        assert run(str(installed / "aorta"), *words, cwd=tmp_path, home=tmp_path).stdout.startswith("aorta ")


@pytest.mark.dist
def test_train_report_and_a_plan_work_far_from_a_checkout(installed: Path, tmp_path: Path) -> None:
    works(installed, tmp_path)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("interpreter", OTHER_PYTHONS)
def test_so_they_do_under_other_versions_of_python(
    interpreter: str, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    works(environment_of(interpreter, distributions[1], tmp_path / "venv"), tmp_path / "empty")


def works(installed: Path, tmp_path: Path) -> None:
    aorta, here = str(installed / "aorta"), {"cwd": tmp_path, "home": tmp_path}
    run(aorta, "train", "--nproc_per_node", "2", "label=two", "training.device=cpu", *SMALL, **here)
    said = run(aorta, "report", "two", "--brief", "--output", "page", **here).stdout
    assert "overlap_ratio" in said
    assert (tmp_path / "page" / "report.html").stat().st_size > 100_000
    plan = ("--output", "ab", "--launches", "1", "--candidate", "parallel.overlap=false", "--report")
    said = run(aorta, "ab", *plan, "training.device=cpu", *SMALL, **here).stdout
    assert "verdict: inconclusive" in said
    assert not [
        path for path in tmp_path.iterdir() if path.name not in {"artifacts", "page", "ab", ".cache", ".config"}
    ]


def test_another_distribution_of_the_same_import_name_is_refused_by_name(installed: Path, tmp_path: Path) -> None:
    """pip lets it overwrite our files, one by one."""
    own = Path(run(str(installed / "python"), "-c", PURELIB, cwd=tmp_path, home=tmp_path).stdout.strip())
    other = own / "amd_aorta-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aorta\nVersion: 1.0\n")
    try:
        done = subprocess.run(
            [installed / "aorta", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    finally:
        shutil.rmtree(other)
    assert (done.returncode, done.stdout) == (2, "")
    assert "aorta-bench and amd-aorta are installed in one environment" in done.stderr
    assert "Traceback" not in done.stderr
