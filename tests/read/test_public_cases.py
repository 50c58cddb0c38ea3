"""What people report in public, and whole reports of traces by hand, are answered rightly, whatever tool wrote them.

`public_cases/` has a file for each kind: its cases, each with files of traces (`source`: where somebody reported the
like) and the right answer, which was worked out from the rows by a sweep that shares nothing with AORTA. A file is JSON
(also packed with gzip), text, bytes in base64, or SQL that makes a database. Of the answer, `steps` and `whole` are
metrics (null: null with a reason), `reasons` what is said of a null, `devices` the metrics of the whole traces,
`kernels` how many kernels of each class there are, `gaps` those of a stream, and `notes` words of notes.
`report_cases.json` has cases by hand, with values of the entry in `summary.json`, by their paths, words of its reasons
(`says`), and what is found (`findings`, null where a rule does not hold).
"""

from __future__ import annotations

import base64
import gzip
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.account import account_of
from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.findings import explain
from aorta.documents import as_json
from aorta.errors import InputError
from aorta.read.run import Run
from aorta.read.traces.load import load_traces

FOLDER = Path(__file__).parent / "public_cases"
CASES = [
    pytest.param(case, id=f"{path.stem}: {case['name']}")
    for path in (*sorted(FOLDER.iterdir()), FOLDER.with_name("report_cases.json"))
    for case in json.loads(path.read_text())
]


def write(path: Path, form: str, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match form:
        case "json":
            path.write_text(json.dumps(content))
        case "gzip":
            path.write_bytes(gzip.compress(json.dumps(content).encode()))
        case "text":
            path.write_text(content)
        case "base64":
            path.write_bytes(base64.b64decode(content))
        case "sql":
            with closing(sqlite3.connect(path)) as database:
                database.executescript("\n".join(content))


def check_entry(run: Run, paths: dict[str, Any], says: dict[str, str], findings: dict[str, Any]) -> None:
    """Values of the entry of a dataset, words of it, and where its rules hold."""
    dataset = LabelledRun("x", run)
    explained = aggregate(dataset)
    explain(dataset, explained, account_of(dataset))
    entry = as_json(explained)
    rules = {found["rule"]: found for found in entry["findings"]}
    for rule, told in findings.items():
        assert (rule in rules) == (told is not None), rule
        seen = {} if told is None else rules[rule]
        assert {key: seen[key] for key in told or {} if key != "sentence"}.items() <= (told or {}).items()
        assert (told or {}).get("sentence", "") in seen.get("sentence", "")

    def at(path: str) -> Any:
        value: Any = entry
        for part in path.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value

    assert {path: at(path) for path in paths} == {
        path: value if value is None or isinstance(value, (list, dict)) else pytest.approx(value)
        for path, value in paths.items()
    }
    assert [path for path, words in says.items() if words not in at(path)] == []


def near(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value if value is None else pytest.approx(value, abs=1e-6) for name, value in values.items()}


def check_step(run: Run, right: dict[str, Any]) -> None:
    steps = run.ranks[right["rank"]].steps
    (at,) = (steps.global_step == right["step"]).nonzero()[0].tolist()
    reasons, metrics = steps.reasons[int(steps.reason[at])], right.get("metrics", {})
    seen = {name: float(steps.metrics[name][at]) for name in metrics}
    assert {name: None if value != value else value for name, value in seen.items()} == near(metrics)
    assert all(reasons.get(name) for name, value in metrics.items() if value is None)
    assert [reasons[name] for name, text in right.get("reasons", {}).items() if text not in reasons[name]] == []


@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_right(case: dict[str, Any], tmp_path: Path) -> None:
    for name, files in case["files"].items():
        ((form, content),) = files.items()
        write(tmp_path / name, form, content)
    right = case["expect"]
    if "refusal" in right:
        with pytest.raises(InputError) as caught:
            load_traces(str(tmp_path))
        assert right["refusal"] in str(caught.value)
        return
    run = load_traces(str(tmp_path))
    assert run.traces is not None
    notes, whole, kernels = "\n".join(run.health.notes), run.traces.whole, run.traces.kernels
    for step in right.get("steps", []):
        check_step(run, step)
    for number, metrics in right.get("whole", {}).items():
        assert {name: whole[number]["metrics"][name] for name in metrics} == near(metrics)
    if devices := right.get("devices"):
        seen = [{name: entry["metrics"][name] for name in devices[0]} for entry in whole.values()]
        assert sorted(seen, key=lambda entry: [*entry.values()]) == devices
    assert [words for words in right.get("notes", []) if words not in notes] == []
    assert sorted(run.ranks) == right.get("ranks", sorted(run.ranks))
    counts = Counter(kernel.cls for kernel in kernels.by_name for _ in range(kernel.count))
    assert counts == right.get("kernels", counts)
    if "collectives" in right:
        assert len(run.ranks[0].collectives) == right["collectives"]
    gaps = {str(entry.stream): entry.gaps for entry in kernels.gaps}
    assert right.get("gaps", {}).items() <= gaps.items()
    numbers = {str(rank): tables.steps.global_step.tolist() for rank, tables in run.ranks.items()}
    assert right.get("numbers", numbers) == numbers
    check_entry(run, right.get("entry", {}), right.get("says", {}), right.get("findings", {}))
    if "shares" in right:
        shares = [kernel.share for kernel in kernels.by_name]
        assert (max(shares) <= 1 + 1e-9, sum(shares)) == (True, pytest.approx(right["shares"]))
