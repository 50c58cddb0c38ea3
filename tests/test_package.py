"""The package as people install it: a wheel, in a fresh environment, in an empty folder far from any checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from aorta.commands import COMMANDS, main
from aorta.read.record import load_run
from tests import newcomer
from tests.runs import HANGS_S, ROOT, SMALL, environment, losses, once

OTHER_PYTHONS = [path for path in os.environ.get("AORTA_PYTHONS", "").split(os.pathsep) if path]
"""Interpreters of environments that have what AORTA depends on (CONTRIBUTING.md)."""
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
DATA = (
    "aorta/config/yaml/default.yaml",
    "aorta/config/yaml/experiment/full.yaml",
    "aorta/report/page/assets/page.html.jinja",
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
    folder = once(tmp_path_factory, "package", build)
    (sdist,), (wheel,) = folder.glob("tree/dist/*"), folder.glob("*.whl")
    return sdist, wheel


def build(folder: Path) -> None:
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


def environment_of(interpreter: str, wheel: Path, place: Path) -> Path:
    """The folder of programs of an environment that has the wheel, and of the interpreter's its dependencies."""
    run(interpreter, "-m", "venv", "--without-pip", str(place), cwd=place.parent, home=place.parent)
    python = str(place / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python)  # making it a pip of its own would take longer than all
    run(*pip, "install", "--no-deps", "--quiet", str(wheel), cwd=place, home=place)
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


@pytest.mark.thorough
def test_every_command_explains_itself_and_gives_its_version(installed: Path, tmp_path: Path, capsys) -> None:
    def said(*words: str) -> str:
        return run(str(installed / "aorta"), *words, cwd=tmp_path, home=tmp_path).stdout

    overview = said("--help")
    for name, command in COMMANDS.items():
        assert f"aorta {name}" in overview
        if command.parser:  # quicker here
            with suppress(SystemExit):
                main([name, "--help"])
        shown = capsys.readouterr().out if command.parser else said(name, "--help")
        assert "xample" in shown, f"aorta {name} --help shows no example"
    for words in (("--version",), ("train", "--version")):
        assert said(*words).startswith("aorta ")


@pytest.mark.thorough
@pytest.mark.dist
def test_train_and_report_work_far_from_a_checkout_and_a_plan_would(installed: Path, tmp_path: Path) -> None:
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
    said = run(aorta, "report", "two", "--output", "page", **here).stdout
    assert "overlap_ratio" in said
    assert (tmp_path / "page" / "report.html").stat().st_size > 100_000
    plan = ("--output", "ab", "--launches", "1", "--candidate", "parallel.overlap=false", "--dry-run")
    commands = run(aorta, "ab", *plan, **here).stdout.splitlines()
    assert [" -m aorta train " in line for line in commands] == [True, True]  # as `aorta train` launched it
    assert not [path for path in tmp_path.iterdir() if path.name not in {"artifacts", "page", ".cache", ".config"}]


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


def the_demo_is_a_plan_of_real_launches(plan: Path) -> None:
    for side, overlap in (("reference", True), ("candidate", False)):
        folder = plan / side / "00"
        run = load_run(folder)
        assert run.health.world_size == 2
        manifest = json.loads((folder / "run.json").read_text())
        assert manifest["config"]["parallel"]["overlap"] is overlap
        assert manifest["config"]["fabric"]["kind"] == "emulated"
        assert manifest["command"][-1] == "label=null"
        assert run.health.notes[0].startswith("EMULATED FABRIC: ")
    assert losses(plan / "candidate" / "00") == losses(plan / "reference" / "00")  # only times are emulated


def test_every_printed_command_is_run_here_or_said_why_not() -> None:
    assert sorted(newcomer.printed()) == sorted([*newcomer.HERE, *newcomer.ELSEWHERE])


@pytest.mark.thorough
@pytest.mark.dist
def test_a_newcomer_s_commands_end_and_answer_as_the_pages_say(installed: Path, tmp_path: Path) -> None:
    """An empty home, a clean checkout, every command as it is printed. One test, because its commands take minutes."""
    home, folder = tmp_path / "home", tmp_path / "newcomer" / "aorta"
    home.mkdir()
    newcomer.checkout(folder, installed)
    left_out = {"PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS"}  # a newcomer has none of them
    variables = {name: value for name, value in environment(HOME=str(home)).items() if name not in left_out}
    answers = newcomer.typed([line for line in newcomer.printed() if line in newcomer.HERE], folder, variables)
    ended = {line: answers[line].code for line in newcomer.HERE}
    assert ended == newcomer.HERE, "\n".join(answers[line].err for line in ended if ended[line] != newcomer.HERE[line])
    assert [line for line, answer in answers.items() if "Traceback" in answer.err] == []
    the_demo_is_a_plan_of_real_launches(folder / "artifacts" / "demo")
    said = answers["bash scripts/demo.sh"].out
    # On a terminal its progress is one bar, below the line that says what is compared.
    assert 2 + len(said.splitlines()) <= 25, said
    assert re.match(r"\[x\] .*more exposed", said, re.IGNORECASE)
    for words in ("overlap_ratio", "parallel.overlap", "reports/demo/report.html"):
        assert words in said
    pages = ("demo/report.html", "two/report.html", "two/two_timeline.png")
    assert [page for page in pages if not (folder / "reports" / page).is_file()] == []
    assert "parallel.strategy" in answers["aorta report two sharded"].out
    assert "overlap_ratio" in answers["aorta report artifacts/mine"].out
    assert "overlap_ratio" in answers["aorta report cuda_traces rocm_traces"].out
    assert answers["bash scripts/setup.sh"].out.rstrip().endswith(".venv/bin/python")
