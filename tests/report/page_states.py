"""Every state that a page can be in, written by the report itself from simulated runs and hand-made traces.

python -m tests.report.page_states /tmp/pages     # STATE/report.html each, to look at
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.autopsy.evidence import RankEvidence
from aorta.autopsy.report import verdict_on, write_verdict
from aorta.report.candidates import Candidates, write_candidates
from aorta.report.page.page_content import PAGE_FILE, write_page
from aorta.report.summary import summarize
from tests.analysis.builders import header, metrics, simulated_run, step, write_manifest, write_rank
from tests.autopsy.hangs import ddp, run, stuck_in
from tests.read.kineto_files import ALLREDUCE, GEMM, document, kernel
from tests.read.kineto_files import step as kineto_step
from tests.report.pages import sampled

REFERENCE_MS: Final = 4.0
SLOW_MS: Final = 10.0
LAUNCHES: Final = 4


def _run(folder: Path, transfer_ms: float = REFERENCE_MS, seed: int = 1, ranks: int = 2, **more: Any) -> Path:
    label = "-".join(folder.parts[-2:])  # no two sides hold the same run
    return simulated_run(folder, label=label, ranks=ranks, transfer_ms=transfer_ms, seed=seed, **{"steps": 20, **more})


def _set(folder: Path, transfer_ms: float, first_seed: int, spread_ms: float = 0.1) -> Path:
    for at in range(LAUNCHES):
        _run(folder / f"{at:02d}", transfer_ms + spread_ms * at, first_seed + at, steps=12)
    return folder


def _sets(folder: Path, reference_ms: float, candidate_ms: float, spread_ms: float = 0.1) -> dict[str, Path]:
    sides = {"reference": (reference_ms, 0), "candidate": (candidate_ms, 10)}
    return {side: _set(folder / side, mean, seed, spread_ms) for side, (mean, seed) in sides.items()}


def _shifted(folder: Path) -> dict[str, Path]:
    """The candidate's buckets take longer where backward hides them; what is exposed differs by less than its
    margin.
    """
    sides = {side: folder / side for side in ("reference", "candidate")}
    for side, exposed_ms, hidden_ms in (("reference", 4.0, 4.0), ("candidate", 4.02, 6.5)):
        for at in range(LAUNCHES):
            _run(sides[side] / f"{at:02d}", exposed_ms + 0.001 * at, steps=12, hidden_ms=hidden_ms)
    return sides


def _traces(folder: Path) -> dict[str, Path]:
    """Two ranks; a kernel's name is longer than any column, as those of template libraries are."""
    for rank in range(2):
        events = []
        for number in range(3):
            start = 12_000 * number
            events.append(kineto_step(number, start, 10_000 + 300 * rank))
            for at in range(6):
                events.append(kernel(f"{GEMM}_{'SE_K1_' * 30}{at % 3}", start + 100 + 1_300 * at, 1_200))
                events.append(kernel(ALLREDUCE, start + 800 + 1_500 * at, 1_000 + 100 * rank, stream=20))
        folder.mkdir(exist_ok=True)
        told = document(events, distributedInfo={"rank": rank, "world_size": 2, "backend": "nccl"})
        (folder / f"rank{rank}.json").write_text(json.dumps(told))
    return {"traces": folder}


def _not_comparable(folder: Path) -> dict[str, Path]:
    sides = {side: _run(folder / side) for side in ("reference", "candidate")}
    for side, where in sides.items():
        config = {"workload": {"name": "gpt", "model_dim": 64 if side == "reference" else 128}}
        write_manifest(where, config, run_id=f"run-{'-'.join(where.parts[-2:])}", world_size=2, platform="cuda")
    return sides


def _one_rank(folder: Path) -> dict[str, Path]:
    """Its collectives communicate with nobody."""
    lines = [step(0, 1, at, overlap=metrics(20 + at % 3, 15, 2, 1)) for at in range(12)]
    write_rank(folder / "alone", header(0, 1), lines)
    write_manifest(folder / "alone", run_id="run-alone", world_size=1)
    return {"alone": folder / "alone"}


def _hung(folder: Path) -> dict[str, Path]:
    """A rank that stays in its data loader, and the report of the autopsy on it."""
    where = _run(folder / "cuda", 6.0, ranks=4)
    evidence = run(ddp(4), {3: stuck_in("data")})
    save_autopsy(where, [msgspec.structs.replace(each, pid=4711 + each.rank, host="node3") for each in evidence])
    return {"cuda": where}


def save_autopsy(folder: Path, evidence: Sequence[RankEvidence]) -> None:
    """Judge evidence and leave the report in a run's folder, as the watchdog does."""
    write_verdict(folder, verdict_on(evidence, watched=True))


STATES: Final[dict[str, Callable[[Path], dict[str, Path]]]] = {
    "single": lambda folder: {"cuda": sampled(_run(folder / "cuda", 6.0))},
    "traces": _traces,
    "launch_set": lambda folder: {"cuda": _set(folder / "cuda", SLOW_MS, 0)},
    "regression": lambda folder: _sets(folder, REFERENCE_MS, SLOW_MS),
    "undecided": lambda folder: _sets(folder, 7.0, 7.0, spread_ms=0.8),
    "shifted": _shifted,
    "not_comparable": _not_comparable,
    "one_rank": _one_rank,
    "hung": _hung,
}
"""Name -> what makes the inputs of that state: label -> folder, the reference first where two are compared."""


CANDIDATES: Final = "candidates"
"""The state of the page of a plan with several candidates, which is another template."""


def plan(folder: Path, launches: int = 6) -> Path:
    """A plan whose first candidate is faster, the second the same, the third slower, and the fourth did other work."""
    for place, transfer_ms in enumerate((8.0, 4.0, 8.0, 14.0, 8.0)):
        side = folder / (f"candidate-{place}" if place else "reference")
        for at in range(launches):
            _run(side / f"{at:02d}", transfer_ms + 0.1 * at, 10 * place + at, 3 if place == 4 else 2, steps=12)
    return folder


def write_state(name: str, folder: Path) -> Path:
    """Make the inputs of a state and write its page; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == CANDIDATES:
        write_candidates(Candidates.read(plan(folder / "plan"), Rules(assume_no_drift=True)), folder / PAGE_FILE)
        return folder / PAGE_FILE
    sources = STATES[name](folder)
    subjects = read_subjects(sources, Rules())
    summary = summarize(subjects, *(sources if len(sources) == 2 else (None, None)))
    path = folder / PAGE_FILE
    write_page({label: subject.dataset for label, subject in subjects.items()}, summary, path)
    return path


if __name__ == "__main__":
    for state in (*STATES, CANDIDATES):
        write_state(state, Path(sys.argv[1]) / state)
