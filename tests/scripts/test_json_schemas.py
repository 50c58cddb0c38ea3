"""The published JSON Schemas: up to date, true of what AORTA writes, and strict enough to notice damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from aorta.report.summary import write_report
from scripts.json_schemas import FILES, file_name, main
from tests.analysis.builders import simulated_run, strict_json
from tests.analysis.compare.builders import launch_set
from tests.docs.pages import ROOT
from tests.runs import train

PUBLISHED = ROOT / "docs" / "schemas"
SAMPLE = ROOT / "tests" / "samples" / "two_gloo_ranks"


def published(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((PUBLISHED / file_name(name)).read_text()))


def check_run(folder: Path) -> None:
    """Every line of every rank, and the manifest."""
    lines = published("record")
    for path in sorted(folder.glob("rank_*_metrics.jsonl")):
        for line in path.read_text().splitlines():
            lines.validate(json.loads(line))
    published("run").validate(strict_json(folder / "run.json"))


def test_the_published_files_are_those_that_the_types_make(tmp_path):
    main(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        path.name: path.read_text() for path in PUBLISHED.iterdir()
    }, "python -m scripts.json_schemas docs/schemas"
    for name, (_, version, _) in FILES.items():
        schema = published(name).schema
        Draft202012Validator.check_schema(schema)
        assert (schema["$id"], schema["version"]) == (f"urn:aorta:{name}:{version}", version)


@pytest.mark.dist
def test_a_sample_and_a_real_run_and_its_report_are_valid(tmp_path):
    train(tmp_path / "run", "label=two", "baseline=true", "baseline.steps=4")
    check_run(SAMPLE)
    check_run(tmp_path / "run" / "two")
    write_report({"two": tmp_path / "run" / "two"}, tmp_path / "out", html=False)
    published("summary").validate(strict_json(tmp_path / "out" / "summary.json"))


@pytest.mark.thorough
def test_summaries_of_every_shape_are_valid(tmp_path):
    """One run; two runs compared; two launch sets compared; a run without a step that counts."""
    made = {name: simulated_run(tmp_path / name, label=name, ranks=2, steps=6) for name in ("a", "b")}
    sets = {name: launch_set(tmp_path / f"set-{name}", [0.8, 0.81, 0.79, 0.8]) for name in ("a", "b")}
    idle = {"idle": simulated_run(tmp_path / "idle", label="idle", ranks=1, steps=2, warmup=2)}
    asked = [({"sample": SAMPLE}, ()), (made, ("a", "b")), (sets, ("a", "b")), (idle, ())]
    for number, (sources, compared) in enumerate(asked):
        found = write_report(sources, tmp_path / f"out-{number}", *compared, html=False).summary
        first = next(iter(found["datasets"].values()))
        assert (first["count"] > 0) is (sources is not idle)
        published("summary").validate(found)
