"""Run folders in every state a cluster leaves one in, with what is said of their health: `record_cases.json`.

A case has the `files` of a folder (a record as its `lines`, JSON, or text where it is broken) and what is expected:
`health` and the numbers of the `steps` of each rank, and words of the notes, of the problems and of the files that are
left out (`says`); or words of a `refusal`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aorta.documents import as_json
from aorta.errors import InputError
from aorta.read.record import load_run
from aorta.read.run import Run

CASES = json.loads((Path(__file__).parent / "record_cases.json").read_text())
AS_THEY_ARE = ("ranks_read", "ranks_missing", "attempt", "endings", "steps_not_on_all_ranks", "gaps")
FABRIC = ("emulated_fabric_rows", "emulated_fabric_backend_slower_rows")


def health_of(run: Run) -> dict[str, Any]:
    told = as_json(run.health)
    counts = {name: len(told[name]) for name in ("files_left_out", "problems", "notes")}
    return {name: told[name] for name in AS_THEY_ARE} | counts | {name: told.get(name) for name in FABRIC}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_health_of_a_run_folder(case: dict[str, Any], tmp_path: Path) -> None:
    for name, content in case["files"].items():
        ((form, value),) = content.items()
        lines = [f"{json.dumps(line)}\n" for line in value] if form == "lines" else []
        text = value if form == "text" else "".join(lines) if form == "lines" else json.dumps(value)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if "refusal" in case:
        with pytest.raises(InputError) as caught:
            load_run(tmp_path)
        assert [words for words in case["refusal"] if words not in str(caught.value)] == []
        return
    run = load_run(tmp_path)
    health = run.health
    assert health_of(run) == case["health"]
    assert {str(rank): tables.steps.global_step.tolist() for rank, tables in run.ranks.items()} == case["steps"]
    said = "\n".join([*health.notes, *health.problems, *health.files_left_out])
    assert [words for words in case["says"] if words not in said] == []
    assert (run.manifest is not None) == case["manifest"]
