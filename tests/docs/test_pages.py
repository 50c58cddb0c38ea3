"""What pages and code say about each other: rule numbers, exit codes, dependencies, links, terms, the map of packages,
and every field of the record, the manifest and the summary (artifacts/README.md), every metric (docs/metrics.md).
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

import pytest

from aorta import errors
from aorta.documents.metrics import COLLECTIVE_METRIC_NAMES, HOST_LEAD, OWN_TIME, STEP_METRIC_NAMES, UNDECIDED
from aorta.installation import install_command
from aorta.records import run_files, schema
from aorta.records.schema import CopyDirection
from aorta.timeline.classes import AUX, BUBBLE, COMPUTE, COPY, KINDS
from aorta.timeline.overlap import copy_rates
from tests import workload_table
from tests.docs.pages import PAGES, ROOT, code, fenced, first_column, name, prose, section
from tests.windows import measure_window

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


def test_cited_rules_and_sections_exist_and_the_page_has_the_numbers() -> None:
    assert re.findall(r"^(?:\*\*|\| )([RWK]\d+) ", prose(MEASURING), re.MULTILINE) == NUMBERS
    cited = {path: set(RULE.findall(path.read_text())) for path in (*PAGES, *SOURCES)}
    assert set(NUMBERS) <= set().union(*cited.values())
    assert {name(path): numbers - set(NUMBERS) for path, numbers in cited.items() if numbers - set(NUMBERS)} == {}
    headings = re.findall(r"^## (\d)\. ", prose(MEASURING), re.MULTILINE)
    sections = re.compile(r"measuring\.md[\s\"#]*,[\s\"#]*section (\d)")
    assert set() < {number for path in SOURCES for number in sections.findall(path.read_text())} <= set(headings)


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


def test_places_in_the_code_that_pages_name_exist() -> None:
    """Stations of the walks of the architecture's page, and files; CONTRIBUTING names what is to be written: `mine`."""
    stations = re.findall(r"^\| \d+ \| `(aorta/[\w/]+\.py)`: `([\w.]+)` \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert len(stations) > 12
    missing = [
        f"{path}: {station}"
        for path, station in stations
        for part in station.split(".")
        if not re.search(rf"^ *(?:class|def) {part}\b", (ROOT / path).read_text(), re.MULTILINE)
    ]
    for page in PAGES:
        named = re.findall(r"`((?:aorta|tests|benchmarks)/[\w./-]+)`", page.read_text())
        missing += [f"{name(page)}: {path}" for path in named if not (ROOT / path).exists() and "mine" not in path]
    assert missing == []


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LARGEST_PICTURE = 150_000


def test_every_page_is_listed_and_pictures_are_small_and_used() -> None:
    used = {page: {(page.parent / target).resolve() for target in LINK.findall(prose(page))} for page in PAGES}
    index = ROOT / "docs" / "README.md"
    assert set(PAGES) - {index} <= used[index]
    pictures = {path for path in (ROOT / "docs" / "images").iterdir() if path.is_file()}
    assert pictures
    assert pictures <= set().union(*used.values())
    assert [picture.name for picture in pictures if picture.stat().st_size >= LARGEST_PICTURE] == []


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
READ_BY_USERS: Final = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "aorta/report/page/assets").glob("*")),
)


def strings(path: Path) -> Iterator[str]:
    """The strings of a module that are no docstring and no statement of their own."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in silent)


def test_a_word_that_is_out_is_nowhere_a_user_reads() -> None:
    texts = [(path, text) for path in (ROOT / "aorta").rglob("*.py") for text in strings(path)]
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


# --- formats ------------------------------------------------------------------------------------------------------

RECORD_PAGE = ROOT / "artifacts" / "README.md"
METRICS_PAGE = ROOT / "docs" / "metrics.md"


def test_every_struct_of_the_record_has_a_table_of_its_fields_in_their_order() -> None:
    parts = re.split(r"^#{1,6} ", prose(RECORD_PAGE), flags=re.MULTILINE)
    tables = {tuple(field for cell in first_column(part) for field in code(cell)) for part in parts}
    made = {value for value in vars(schema).values() if isinstance(value, type)}
    structs = {struct for struct in made if issubclass(struct, schema.msgspec.Struct)}
    assert [struct.__name__ for struct in structs if struct.__struct_fields__ not in tables] == []


def test_versions_kinds_and_recorded_variables() -> None:
    text, manifest = RECORD_PAGE.read_text(), section(RECORD_PAGE, "The manifest: `run.json`")
    assert f"`schema_version` {schema.SCHEMA_VERSION} " in text
    assert f"`{' '.join(KINDS)}`" in text
    assert all(f"{prefix}*" in manifest for prefix in run_files.ENVIRONMENT_PREFIXES)
    window = section(METRICS_PAGE, "The window")
    assert all(f"**{kind}**" in window for kind in (COMPUTE, COPY, AUX, BUBBLE))
    assert all(f"`{kind}`" in window for kind in KINDS)


def test_metrics_of_the_record_of_the_report_and_of_collectives() -> None:
    def listed(*headings: str) -> set[str]:
        cells = [cell for heading in headings for cell in first_column(section(METRICS_PAGE, heading))]
        return {metric.replace("<kind>", kind) for cell in cells for metric in code(cell) for kind in KINDS}

    everything = measure_window(
        (0, 10), compute=[(0, 5)], comm={kind: [(3, 8)] for kind in KINDS}, pipeline=[(0, 9)], bubbles=[(5, 8)]
    )
    rates = copy_rates((direction, 1, (0, 1)) for direction in get_args(CopyDirection))
    recorded = {*everything.metrics()[0], *rates, HOST_LEAD, OWN_TIME, UNDECIDED}
    assert listed("In the record, and in the report") == recorded
    assert listed("In the record, and in the report", "Only in the report") == set(STEP_METRIC_NAMES)
    assert listed("Of single collectives") == set(COLLECTIVE_METRIC_NAMES)
