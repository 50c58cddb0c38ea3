"""Injects every fault of the pool into short trainings, and scores what the autopsy says of each.

    python -m benchmarks.autopsy_scores --runs 3 --ranks 2,4 --layouts ddp,fsdp_tp --parallel 6 --rows rows.jsonl

Ranks are forked from this process, which has imported torch once; those that hang sleep, so that several trainings fit
a core. Standard output has a table, and as its last line a JSON object: how often exactly the right ranks were accused,
healthy ones were, the phase and the kind of verdict were right, and the autopsy abstained; and the seconds from the
last progress to the evidence.

Beside it, of the same runs: what the autopsy makes of torch's own dumps, which each rank that can takes when it hangs
or ends.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
import torch._dynamo  # DDP imports it: once, before the ranks are forked

import aorta.parallel.fsdp
import aorta.parallel.plan  # noqa: F401
from aorta.autopsy.evidence import RankEvidence, Verdict
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from aorta.autopsy.processes import EVIDENCE_FILE, progress_evidence
from aorta.autopsy.report import verdict_on
from aorta.config.resolve import Resolved
from aorta.errors import InputError
from aorta.recording.train import run_training
from aorta.recording.train_step import resolved
from aorta.records.progress import ANNOUNCED
from aorta.records.run_files import AUTOPSY_DIR

PIPELINES: Final = ("pp", "fsdp_pp")
STEP: Final = 9
WARMUP_STEPS: Final = 2
GRACE_S: Final = 30.0
WITHIN_S: Final = 180.0
SLOW_FOR_S: Final = 6.0
"""How long slow ranks go on before they are looked at."""
DUMPS_WITHIN_S: Final = 3.0
WORKLOAD: Final = (
    "training.max_steps=100000",
    "training.progress=overlap",
    "clock.sync=false",
    "telemetry.devices=off",
    f"telemetry.warmup_steps={WARMUP_STEPS}",
    f"watchdog.grace_s={GRACE_S}",
    f"fault.step={STEP}",
)
LIGHT: Final = (
    "training.batch_size=4",
    "dataset.sequence_length=8",
    "workload.num_layers=1",
    "training.grad_clip_norm=null",
    "workload.model_dim=32",
    "workload.num_heads=2",
    "workload.mlp_hidden_dim=64",
    "workload.vocab_size=200",
)
"""A model that computes for some milliseconds: what is asked is who waits for whom."""
_ASKED: Final = "dumps_wanted"


class Expected(NamedTuple):
    """What an autopsy should find of one kind of fault: the `verdict` (one of `aorta.autopsy.evidence.Kind`), the phase
    that the rank is in then (None: any), the aspect of a signature mismatch.
    """

    verdict: str
    phase: str | None = None
    aspect: str | None = None


EXPECTED: Final[dict[str, Expected]] = {
    "workload_exception": Expected("dead", "forward"),
    "async_exception": Expected("dead", "forward"),
    "signal_exception": Expected("dead", "forward"),
    "sigint": Expected("dead"),
    "sigterm": Expected("dead", "forward"),
    "sigkill": Expected("dead", "forward"),
    "sigstop": Expected("stopped", "forward"),
    "segfault": Expected("dead", "forward"),
    "abort": Expected("dead", "forward"),
    "lock_gil": Expected("stuck_outside", "forward"),
    "stuck_forward": Expected("stuck_outside", "forward"),
    "link_stalled": Expected("stuck_inside"),
    "skipped_collective": Expected("signature_mismatch", "forward", "size"),
    "swapped_order": Expected("signature_mismatch", "forward", "size"),
    "wrong_size": Expected("signature_mismatch", "forward", "size"),
    "wrong_dtype": Expected("signature_mismatch", "forward", "dtype"),
    "wrong_kind": Expected("signature_mismatch", "forward", "kind"),
    "wrong_group": Expected("signature_mismatch", "forward", "group"),
    "rank_dependent_branch": Expected("signature_mismatch", "forward", "kind"),
    "slow_data": Expected("slow", "data"),
    "stuck_data": Expected("stuck_outside", "data"),
    "stuck_optimizer": Expected("stuck_outside", "optimizer"),
    "stuck_checkpoint": Expected("stuck_outside", "checkpoint"),
    "slow_rank": Expected("slow", "forward"),
}
"""Of each kind of `aorta.config.loop.FAULTS`."""


class Planned(NamedTuple):
    """One training. `kind`: several are joined by +, the first of them on the last rank. `timeout_s`: of its watchdog;
    None: learned.
    """

    kind: str
    ranks: int
    layout: str
    timeout_s: float | None

    @property
    def culprits(self) -> dict[int, Expected]:
        """Faulty rank -> what is wrong with it."""
        return {self.ranks - 1 - at: EXPECTED[kind] for at, kind in enumerate(self.kind.split("+"))}

    @property
    def is_slow(self) -> bool:
        """Whether all ranks go on, so that no watchdog speaks."""
        return all(fact.verdict == "slow" for fact in self.culprits.values())


def run(planned: Planned) -> dict[str, Any]:
    """One training with one fault, on the last rank; returns its scores."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "dumps").mkdir()
        timeout_s = "null" if planned.timeout_s is None else planned.timeout_s
        words = (
            *WORKLOAD,
            *LIGHT,
            *((f"workload.num_layers={planned.ranks}",) if planned.layout in PIPELINES else ()),  # one for each stage
            f"parallel={planned.layout}",
            f"training.output_dir={folder}",
            f"watchdog.timeout_s={timeout_s}",
            f"fault.kind={planned.kind}",
            f"fault.rank={'+'.join(map(str, planned.culprits))}",
        )
        ranks = str(planned.ranks)
        with patch.dict(os.environ, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks):  # as each rank of it will find
            config = resolved(*words)
        children = forked(lambda rank: _trained(config, folder, rank), planned.ranks, folder)
        try:
            evidence = _slow(folder) if planned.is_slow else _reported(folder, planned.ranks)
            _take_dumps(folder, children)
        finally:
            for child in children:
                end(child)
        scores = _scores(planned, evidence) if evidence else {"missed": True}
        return planned._asdict() | scores | _by_dumps(folder, planned.culprits)


def _scores(planned: Planned, evidence: list[RankEvidence]) -> dict[str, Any]:
    """What `aorta autopsy` says of the evidence, against the faults."""
    facts = planned.culprits
    verdict = verdict_on(evidence, watched=not planned.is_slow)
    seen = {each.rank: each for each in evidence}
    phases = [
        (own.phase or seen[own.rank].phase) == facts[own.rank].phase
        for own in verdict.culprits
        if own.rank in facts and facts[own.rank].phase is not None
    ]
    after = [_after_s(seen[rank], fact) for rank, fact in facts.items()]
    against = _accused(verdict, facts)
    if verdict.kind == "stuck_inside" and all(fact.verdict == "stuck_inside" for fact in facts.values()):
        # What holds up a collective that all have issued may be between any two of them.
        against |= {"exact": {one.rank for one in verdict.culprits} <= set(facts), "abstained": False}
    return {
        "missed": False,
        **against,
        "phase": all(phases) if phases else None,
        "verdict": verdict.kind in [fact.verdict for fact in facts.values()],
        "said": verdict.summary,
        "after_s": max((one for one in after if one is not None), default=None),
    }


def _after_s(seen: RankEvidence, fact: Expected) -> float | None:
    """Seconds from a rank's last progress, or the end of the time that its phase is allowed, to the evidence."""
    if fact.verdict == "slow" or seen.taken_ns is None or seen.progress_ns is None:
        return None
    allowed_s = GRACE_S if fact.phase in ANNOUNCED else 0.0
    return round((seen.taken_ns - seen.progress_ns) / 1e9 - allowed_s, 2)


def _accused(verdict: Verdict, culprits: Collection[int]) -> dict[str, Any]:
    return _against({one.rank for one in verdict.culprits}, culprits)


def _against(accused: set[int], culprits: Collection[int]) -> dict[str, Any]:
    return {
        "exact": accused == set(culprits),
        "healthy_accused": len(accused - set(culprits)),
        "abstained": not accused,
    }


def forked(act: Callable[[int], int], ranks: int, folder: Path) -> list[int]:
    """Fork ranks that find what torchrun would show them, call `act` and end with what it returns; their pids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                said = os.open(folder / f"rank_{rank}.said", os.O_WRONLY | os.O_CREAT)
                os.dup2(said, 1)
                os.dup2(said, 2)
                code = act(rank)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(code)
        children.append(child)
    return children


def _trained(config: Resolved, folder: Path, rank: int) -> int:
    torch.set_num_threads(1)  # as torchrun starts several ranks of a host
    threading.Thread(target=_dump_when_asked, args=(folder, rank), daemon=True).start()
    try:
        return run_training(config)
    finally:
        _dump(folder, rank)


def _dump_when_asked(folder: Path, rank: int) -> None:
    while not (folder / _ASKED).exists():
        time.sleep(0.5)
    _dump(folder, rank)


def _dump(folder: Path, rank: int) -> None:
    """Write torch's dump of this rank, as `docs/autopsy.md` has it, for once."""
    path = folder / "dumps" / f"comm_lib_trace_rank_{rank}"
    if not path.exists():
        part = folder / f"dump_{rank}.part"
        part.write_bytes(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
        part.replace(path)


def _take_dumps(folder: Path, children: list[int]) -> None:
    """Ask every rank for its dump, and wait for those that can."""
    (folder / _ASKED).touch()
    within(DUMPS_WITHIN_S, lambda: len(list((folder / "dumps").iterdir())) == len(children))


def _by_dumps(folder: Path, culprits: Collection[int]) -> dict[str, Any]:
    """What the autopsy makes of torch's dumps."""
    dumps = folder / "dumps"
    try:
        accused = _accused(judge(read_dumps([dumps])), culprits)
    except InputError:
        accused = _against(set(), culprits)
    return {"torch_dumps": len(list(dumps.iterdir())), "torch_dumps_autopsy": accused}


def _reported(folder: Path, ranks: int) -> list[RankEvidence]:
    """What the watchdog saved, once it has saved all of it."""
    saved = [folder / AUTOPSY_DIR / EVIDENCE_FILE.format(rank=rank) for rank in range(ranks)]
    if not within(WITHIN_S, lambda: all(path.exists() for path in saved)):
        return []
    return progress_evidence(folder)


def _slow(folder: Path) -> list[RankEvidence]:
    """Evidence of ranks that go on, while one waits for another."""
    begun = within(WITHIN_S, lambda: any((each.step or 0) > STEP for each in progress_evidence(folder, saved=False)))
    time.sleep(SLOW_FOR_S)
    return progress_evidence(folder, saved=False) if begun else []


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something holds before so many seconds have passed."""
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def end(child: int) -> None:
    """Kill a forked rank."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    after = sorted(row["after_s"] for row in rows if row.get("after_s") is not None)
    phases = [row["phase"] for row in rows if row.get("phase") is not None]
    return {
        "runs": len(rows),
        "missed": sum(row["missed"] for row in rows),
        **_counts(rows),
        "verdict_right": sum(row.get("verdict", False) for row in rows),
        "phase_right": sum(phases),
        "phases": len(phases),
        "after_s_p90": round(statistics.quantiles(after, n=10, method="inclusive")[-1], 1) if len(after) > 1 else None,
        "after_s_max": max(after, default=None),
        "torch_dumps_autopsy": _counts(row["torch_dumps_autopsy"] for row in rows),
    }


def _counts(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    rows = list(rows)
    return {what: sum(row.get(what, 0) for row in rows) for what in ("exact", "healthy_accused", "abstained")}


def _table(rows: list[dict[str, Any]]) -> str:
    """One line for each layout, number of ranks and kind."""
    names = ["layout", "ranks", "kind", "runs", "exact", "healthy", "abstained", "phase", "p90 s"]
    names += ["of torch's dumps"]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for layout, ranks, kind in sorted({(row["layout"], row["ranks"], row["kind"]) for row in rows}):
        of = [row for row in rows if (row["layout"], row["ranks"], row["kind"]) == (layout, ranks, kind)]
        one = _summary(of)
        dumps = f"{one['torch_dumps_autopsy']['exact']} exact, {one['torch_dumps_autopsy']['healthy_accused']} healthy"
        phase = f"{one['phase_right']}/{one['phases']}"
        cells = [layout, ranks, kind, one["runs"], one["exact"], one["healthy_accused"], one["abstained"], phase]
        lines.append(f"| {' | '.join(map(str, [*cells, one['after_s_p90'], dumps]))} |")
    return "\n".join(lines)


def main() -> int:
    """Run those that `--rows` does not have yet; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(EXPECTED), help="kinds of faults, with commas (default: all)")
    parser.add_argument("--runs", type=int, default=1, help="of each kind and number of ranks (default: %(default)s)")
    parser.add_argument("--ranks", default="2", help="numbers of ranks, with commas (default: %(default)s)")
    parser.add_argument("--layouts", default="ddp", help="strategies, with commas (default: %(default)s)")
    parser.add_argument("--parallel", type=int, default=1, help="trainings at once (default: %(default)s)")
    parser.add_argument("--timeout", type=float, help="seconds of the watchdog (default: learned)")
    parser.add_argument("--rows", type=Path, help="file that rows are appended to; runs that it has are not repeated")
    options = parser.parse_args()
    rows = _read_rows(options.rows)
    have = Counter((row["kind"], row["ranks"], row["layout"]) for row in rows)
    planned = [
        Planned(kind, ranks, layout, options.timeout)
        for number in range(options.runs)
        for layout in options.layouts.split(",")
        for ranks in map(int, options.ranks.split(","))
        for kind in options.kinds.split(",")
        if number >= have[kind, ranks, layout]
    ]
    broken = 0
    with ProcessPoolExecutor(options.parallel, mp_context=multiprocessing.get_context("fork")) as pool:
        for done in as_completed([pool.submit(run, each) for each in planned]):
            if (error := done.exception()) is not None:  # of this program: nothing is known of that training
                sys.stderr.write("".join(traceback.format_exception(error)))
                broken += 1
                continue
            row = done.result()
            sys.stderr.write(json.dumps(row) + "\n")
            rows.append(row)
            if options.rows is not None:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    sys.stdout.write(_table(rows) + "\n")
    sys.stdout.write(json.dumps(_summary(rows) | {"broken": broken}) + "\n")
    return 1 if broken else 0


def _read_rows(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
