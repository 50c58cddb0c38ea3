"""What pages and code say about each other: rule numbers, exit codes, dependencies, links, terms, the map of packages,
what a program writes of them, and their site.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from aorta import errors
from aorta.installation import install_command
from tests import workload_table
from tests.docs.pages import PAGES, ROOT, fenced, first_column, name, prose, section

RULE = re.compile(r"\b([RWK]\d{1,2})\b")
MEASURING = ROOT / "docs" / "dev" / "measuring.md"
ARCHITECTURE = ROOT / "docs" / "dev" / "architecture.md"
NUMBERS = [*(f"R{n}" for n in range(1, 11)), *(f"W{n}" for n in range(1, 31)), *(f"K{n}" for n in range(1, 8))]
SOURCES = sorted(
    path
    for folder in ("aorta", "analysis", "scripts", "config", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.suffix in {".py", ".sh", ".yaml"}
)


def test_the_rules_have_the_numbers_the_code_cites() -> None:
    stated = re.findall(r"^(?:\*\*|\| )([RWK]\d+) ", prose(MEASURING), re.MULTILINE)
    assert stated == NUMBERS


def test_cited_rules_exist() -> None:
    cited = {path: set(RULE.findall(path.read_text())) for path in (*PAGES, *SOURCES)}
    assert set(NUMBERS) <= set().union(*cited.values())
    assert {name(path): numbers - set(NUMBERS) for path, numbers in cited.items() if numbers - set(NUMBERS)} == {}


def test_sections_the_code_cites() -> None:
    headings = re.findall(r"^## (\d)\. ", prose(MEASURING), re.MULTILINE)
    cited = {
        number
        for path in SOURCES
        for number in re.findall(r"measuring\.md[\s\"#]*,[\s\"#]*section (\d)", path.read_text())
    }
    assert cited
    assert cited <= set(headings)


def test_exit_codes() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {error.exit_code for error in classes if issubclass(error, errors.AortaError)}
    listed = first_column(section(ROOT / "docs" / "running.md", "Exit codes"))
    assert listed == [*(str(code) for code in sorted({errors.EXIT_OK, *codes})), "128 + n"]


def test_nothing_tells_to_install_a_distribution_that_no_index_has() -> None:
    """Whoever registered the name there would be installed in AORTA's place: it is installed from a checkout."""
    told = re.compile(r"pip install [^\n|]*aorta-bench|aorta-bench\[")
    written = [path for path in {*PAGES, *SOURCES} if path != Path(__file__) and told.search(path.read_text())]
    assert written == []
    assert install_command("dask", "wandb") == 'pip install "PATH/TO/CHECKOUT[dask,wandb]"'
    assert install_command() == 'pip install "PATH/TO/CHECKOUT"'


@pytest.mark.spec("D44")
def test_what_lies_where_in_the_repository() -> None:
    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()

    files = git("ls-files")
    assert {"train.py", "aorta/__init__.py"} <= set(files)
    assert {"config", "aorta", "analysis", "scripts", "artifacts", "docs", "tests"} <= {f.split("/")[0] for f in files}
    assert [file for file in files if file.startswith("artifacts/")] == ["artifacts/.gitkeep", "artifacts/README.md"]
    outputs = ["artifacts/x", "artifacts/cuda/run.json", "reports/x", "site/x"]
    assert git("check-ignore", "--no-index", *outputs, "artifacts/README.md") == outputs


@pytest.mark.spec("D43")
def test_dependencies_are_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = section(ROOT / "docs" / "dev" / "dependencies.md", "Packages")
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        package = re.split(r"[<>=!~\[;, ]", requirement)[0]
        assert re.search(rf"(?<![\w-]){re.escape(package)}(?![\w-])", text), package


def test_the_architecture_s_tree_has_every_package() -> None:
    folders = {path.parent.name for path in (ROOT / "aorta").glob("*/__init__.py")}
    _picture, tree = fenced(ARCHITECTURE, "")
    assert folders == set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))


@pytest.mark.parametrize(("stage", "marks"), [(0, "alone"), (1, "gpu|simulated|rocm")])
def test_tests_stand_where_their_stage_of_the_gate_looks_for_them(stage: int, marks: str) -> None:
    """`scripts/check` collects these folders alone: for its stage of times, and on the simulated device."""
    folders = re.findall(r"^ *folders=\((tests/.*)\)$", (ROOT / "scripts" / "check").read_text(), re.MULTILINE)[stage]
    found = [path for path in SOURCES if re.search(rf"\bmark\.(?:{marks})\b", path.read_text())]
    for folder in folders.split():
        assert any(path.is_relative_to(ROOT / folder) for path in found), f"{folder} has none"
        found = [path for path in found if not path.is_relative_to(ROOT / folder)]
    assert found == []


def test_every_station_of_the_walks_is_where_the_architecture_page_says() -> None:
    stations = re.findall(r"^\| \d+ \| `(aorta/[\w/]+\.py)`: `([\w.]+)` \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert len(stations) > 12
    missing = [
        (path, name)
        for path, name in stations
        for part in name.split(".")
        if not re.search(rf"^ *(?:class|def) {part}\b", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_files_of_the_code_that_pages_name_exist() -> None:
    """CONTRIBUTING names what is still to be written: `mine`."""
    named = {
        (name(page), path)
        for page in PAGES
        for path in re.findall(r"`((?:aorta|tests|benchmarks)/[\w./-]+)`", page.read_text())
    }
    assert named
    assert sorted(place for place in named if not (ROOT / place[1]).exists() and "mine" not in place[1]) == []


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LARGEST_PICTURE = 150_000


def test_every_page_is_listed() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text())}
    assert set(PAGES) - {index} <= linked


def test_pictures_are_small_and_used() -> None:
    used = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(prose(page))}
    pictures = [path for path in (ROOT / "docs" / "images").iterdir() if path.is_file()]
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < LARGEST_PICTURE, picture.name
        assert picture in used, picture.name


OUT: Final = {
    r"matrix products?": "GEMMs",
    r"beside the blocks": "other",
    r"beside the model": "other",
    r"beside communication": "overlapped with communication",
    r"against alone": "vs. alone",
    r"stood waiting|stands? waiting": "was blocked",
    r"ask further": "more",
    r"were (one part|this|it)[a-z ]*? (alone )?free": "if X were free",
    r"per cent sure|, sure\b|not sure": "significant, not significant",
    r"work beside": "other work",
    r"behind init_process_group": "after init_process_group",
    r"what to bear in mind": "note",
    r"stand where a label does": "can be used in place of a label",
    r"all reduces?\b": "all-reduce",
    r"\blies? (beside|apart|far)\b|beside nothing": "overlaps, differs",
    r"\bwhatever they\b|take part in nothing|say nothing of": "(leave it out)",
    r"the difference may be that of|what the (test|launch|network)": "name the subject",
}
"""Pattern (case ignored) -> what to write."""
SPOKEN: Final = (
    *sorted((ROOT / "aorta").glob("*.py")),
    *(
        path
        for part in ("analysis", "experiments", "streams", "gpu_check", "rpc")
        for path in (ROOT / "aorta" / part).rglob("*.py")
    ),
)
READ_BY_USERS: Final = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "aorta/report/page/assets").glob("*")),
)


def strings(path: Path) -> Iterator[str]:
    """The strings of a module that are no docstring and no statement of their own, f-strings with `{}`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (silent | inner):
            yield node.value


def test_a_word_that_is_out_is_nowhere_a_user_reads() -> None:
    texts = [(path, text) for path in SPOKEN for text in strings(path)]
    texts += [(path, " ".join(path.read_text(encoding="utf-8").split())) for path in READ_BY_USERS]
    assert [
        f"{path.relative_to(ROOT)}: {text[max(0, hit.start() - 40) :][:90]}: write {instead}"
        for pattern, instead in OUT.items()
        for path, text in texts
        for hit in re.finditer(pattern, text, re.IGNORECASE)
    ] == []


def test_every_behaviour_has_a_test_that_names_it_and_stands_once_in_order() -> None:
    page = (ROOT / "docs" / "dev" / "spec-rows.md").read_text().partition("## A.")[2]
    in_tables = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| row |")]
    rows = [(row[0], int(row[1:])) for row in re.findall(r"^\| ([A-Z]\d+) \| [^|]+ \|$", page, re.MULTILINE)]
    assert (len(rows), rows) == (len(in_tables), sorted(set(rows)))
    marks = "".join(
        mark
        for path in (ROOT / "tests").rglob("test_*.py")
        for mark in re.findall(r"^@pytest\.mark\.spec\(([^)]*)\)", path.read_text(), re.MULTILINE)
    )
    assert {(row[0], int(row[1:])) for row in re.findall(r'"([A-Z]\d+)"', marks)} == set(rows)


@pytest.mark.thorough
def test_workloads_are_current() -> None:
    written = workload_table.PAGE.read_text()
    assert written == workload_table.updated(written), "run: python -m tests.workload_table"
