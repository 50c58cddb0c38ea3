"""Who is named for a cause that was planted: `python -m benchmarks.planted_causes [--ranks 2 4] [--causes data20 ...]`.

A DDP program without a line of AORTA (`planted_program`) is recorded as below `aorta record`, with nothing planted (the
reference of all causes of its setting) and with one cause; settings differ in ranks, width and bucket size. `link` is
`train.py` on the emulated network, as `aorta ab` launches it. The launches of a setting take turns, in order and back.
Ranks are forked out of one process that has loaded torch, which saves its import.

    causes      named, wrong (another thing or rank is named first), or silent: 4 against 4 and 8 against 8 launches
    A/A         divisions of equal launches, of the reference or of a cause, into halves that take turns: what is named
    stragglers  of each launch: the right rank, a wrong one, or none, by whether the delay exceeds a tenth of the step;
                healthy launches by whether computation is even, and who is named is said to compute longer
    adds up     parts of every account and change against the step, and means against a stopwatch in the program
    report      of every cause: no cause has the other sign or an interval with 0, nothing is predicted that was
                measured, no clear gain of a straggler that nobody names

`--keep DIR` keeps the runs, `--score DIR` scores those of an earlier one. Prints one JSON object last; exit 1 when a
target is missed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aorta.analysis.account import OUTSIDE, StepAccount, account_of
from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.causes import compare_accounts
from aorta.analysis.compare.launch_set import MOST, drift_inflation, read_subjects
from aorta.analysis.compare.rank_tests import LEAST_LAUNCHES
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.stragglers import stragglers_of
from aorta.documents.comparison import AccountChange
from aorta.documents.dataset import DatasetEntry
from aorta.read.engines import Local
from aorta.read.record import load_run
from aorta.recording.zero_lines import VARIABLE
from aorta.report.summary import summarize
from benchmarks import plans
from tests.ranks import forked
from tests.runs import ROOT, SMALL, environment, succeeded

PROGRAM = ROOT / "benchmarks" / "planted_program.py"
REFERENCE = "reference"
SIZES = (4, 8)
"""Launches a side."""
ALONG_EDGE = 0.1
"""Share of the step from which on a straggler has to be named."""
NAMED = {4: 0.85, 8: 0.95}
"""Least share of causes to be named, by launches a side."""


class Cause(NamedTuple):
    """Words that plant it; what one of the sentences has to say; what others may say. `{rank}` is the rank planted."""

    words: str
    named: str
    allowed: str = "$^"
    delay_ms: float = 0.0


WAITING = "waiting for rank {rank} "


def _asleep(delay_ms: int) -> Cause:
    place = "idle between data and forward"
    return Cause(
        f"slow_rank={{rank}} slow_ms={delay_ms}",
        rf"waiting for rank {{rank}} .*: its {place}|{place}.*\(rank {{rank}}: ",
        WAITING,
        delay_ms,
    )


EXPOSED = r"exposed allreduce, transfer"
CAUSES = {
    "asleep20": _asleep(20),
    "asleep40": _asleep(40),
    "asleep80": _asleep(80),
    "data20": Cause("data_ms=20", "waiting for the DataLoader"),
    "data40": Cause("data_ms=40", "waiting for the DataLoader"),
    "optimizer": Cause("optimizer_ms=20", "optimizer"),
    "computation": Cause("computations=2", "(any phase |forward |backward )?computation"),
    "computation_of_rank": Cause(
        "slow_rank={rank} slow_computations=4",
        r"waiting for rank {rank} .*computation|.*computation.*\(rank {rank}: ",
        WAITING,
    ),
    "synchronous": Cause("synchronous=1", EXPOSED, r"exposed allreduce"),
}
LINK = {
    "bandwidth": Cause("fabric.inter_bandwidth_gb_per_s=0.04", EXPOSED),
    "overlap_off": Cause("parallel.overlap=false", EXPOSED, r"exposed allreduce"),
}
EMULATED = (
    "fabric=emulated fabric.inter_bandwidth_gb_per_s=0.1 training.max_steps=30 telemetry.warmup_steps=5 "
    "workload.model_dim=128 workload.mlp_hidden_dim=512 training.batch_size=8 parallel.bucket_cap_mb=1"
)


class Setting(NamedTuple):
    """What the launches have in common; `link`: `train.py` on the emulated network."""

    ranks: int
    words: str
    causes: dict[str, Cause]
    link: bool = False

    def named(self) -> str:
        sizes = "link" if self.link else "_".join(re.findall(r"\d+", self.words)[:2])
        return f"{self.ranks}_{sizes}"

    @property
    def slow_rank(self) -> int:
        return self.ranks - 1 if "width=256" in self.words else 0


SETTINGS = [
    *(
        Setting(2, f"width={width} bucket_mb={bucket_mb} steps={steps}", CAUSES)
        for width, bucket_mb, steps in ((256, 4, 34), (128, 1, 34), (512, 25, 30), (1024, 4, 28))
    ),
    Setting(2, EMULATED, LINK, link=True),
    *(
        Setting(4, f"width={width} bucket_mb={bucket_mb} batch=16 steps=28", CAUSES)
        for width, bucket_mb in ((256, 4), (128, 25), (512, 1))
    ),
    Setting(4, EMULATED, LINK, link=True),
]


def launch(setting: Setting, name: str, folder: Path, turn: int) -> None:
    """One launch into `folder`/name/turn, with its stopwatch beside it."""
    planted = "" if name == REFERENCE else setting.causes[name].words.format(rank=setting.slow_rank)
    run = folder / name / f"{turn:02d}"
    if setting.link:
        own, script = environment(), ROOT / "train.py"
        words = [*SMALL, *setting.words.split(), *planted.split(), f"training.output_dir={run}"]
    else:
        (watches := folder / "stopwatch").mkdir(parents=True, exist_ok=True)
        own, script = environment(**{VARIABLE: str(run)}), PROGRAM
        words = [*setting.words.split(), *planted.split(), f"stopwatch={watches / name}-{turn:02d}"]
    succeeded(forked(script, *words, ranks=setting.ranks, environment=own, timeout_s=300))


class Launch(NamedTuple):
    """What is scored of one."""

    account: StepAccount
    named: list[int]
    uneven: str
    stopwatch: dict[str, float]


def read(folder: Path, name: str) -> list[Launch]:
    """Return the launches of one name, by turn."""
    found = []
    for run in sorted((folder / name).iterdir()):
        dataset = LabelledRun(name, load_run(run, Local(1), exposed=True))
        account = account_of(dataset)
        assert isinstance(account, StepAccount), f"{run}: {account}"
        said, *_ = stragglers_of(dataset, account)
        watches = [json.loads(file.read_text()) for file in folder.glob(f"stopwatch/{name}-{run.name}-*.json")]
        means = (
            {key: float(np.mean([watch[key] for watch in watches])) for key in watches[0] if key != "all"}
            if watches
            else {}
        )
        found.append(Launch(account, [rank.rank for rank in said.ranks], said.uneven or "", means))
    return found


def judged(cause: Cause, rank: int, said: Sequence[str]) -> str:
    """Return `named`, `wrong` or `silent`; `beside`: it is named first, and something else that changed behind it."""
    named, allowed = (re.compile(pattern.format(rank=rank), re.I) for pattern in (cause.named, cause.allowed))
    others = [not named.match(sentence) and not allowed.match(sentence) for sentence in said]
    if any(others[:1]):
        return "wrong"
    if any(named.match(sentence) for sentence in said):
        return "beside" if any(others) else "named"
    return "wrong" if any(others) else "silent"


def divisions(count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the ways of dividing launches into halves that take turns, as many as a report asks for a cause."""
    if count // 2 < LEAST_LAUNCHES:
        return
    for left in combinations(range(count), count // 2):
        if left[:1] == (0,):
            right = tuple(at for at in range(count) if at not in left)
            of_candidate = np.isin(np.arange(count), right)
            if drift_inflation(np.arange(count), of_candidate) <= MOST:
                yield left, right


def apart(account: StepAccount) -> float:
    """Return how far the parts of an account are from its step, relative to it, at every depth."""
    return max(abs(sum(account.ms(depth).values()) / account.step_ms - 1) for depth in (1, 2, 3))


def against_stopwatch(launches: Sequence[Launch], found: dict[str, list[float]]) -> None:
    """Add what the account says beyond the stopwatch in the program: of the step relative, of parts in ms."""
    for each in launches:
        if watch := each.stopwatch:
            parts = each.account.ms(2)
            found["step"].append(each.account.step_ms / watch["step"] - 1)
            for part in ("data", "optimizer"):
                found[f"{part}_ms"].append(parts.get((OUTSIDE, part), 0.0) - watch[part])


def complaints(folder: Path, name: str) -> list[str]:
    """Return what contradicts itself in the report on a cause."""
    sides = {side: folder / side for side in (REFERENCE, name)}
    summary = summarize(read_subjects(sides, Rules(), Local(1)), REFERENCE, name, Rules())
    account = summary.comparison.account
    if account.reason is not None:
        return [f"no account: {account.reason}"]
    found, step = [], account.step

    def check(part: AccountChange, below: Sequence[AccountChange]) -> None:
        for side in ("reference_ms", "candidate_ms", "change_ms"):
            total = sum(getattr(each, side) for each in below)
            if below and abs(total - getattr(part, side)) > 1e-3 * step.reference_ms:
                found.append(f"{part.name}: parts add up to {total} of {side} {getattr(part, side)}")
        for each in below:
            more = not account.decided and abs(each.change_ms) > abs(step.change_ms)
            if each.cause and not each.parts and each.change_ms * step.change_ms <= 0 and not more:
                found.append(
                    f"{each.name} is a cause of {step.change_ms:+.2f} ms, and changed by {each.change_ms:+.2f}"
                )
            check(each, each.parts)

    check(step, account.parts)
    if account.causes and not any(part.cause for part in account.parts):
        found.append(f"{account.causes}: no row of the table is a cause")
    changed = {each.key for each in summary.comparison.manifest_differences}
    for label, entry in summary.datasets.items():
        found += [f"{label}: {problem}" for problem in predictions(entry, changed)]
    return found


def predictions(entry: DatasetEntry, changed: set[str]) -> Iterator[str]:
    """Yield what a report predicts and has measured, or predicts of nobody."""
    if entry.what_if.reason is not None:
        return
    for gain in entry.what_if.gains:
        if gain.change == "network.bandwidth=x2" and "config.fabric.inter_bandwidth_gb_per_s" in changed:
            yield f"predicted though measured: {gain.sentence}"
        if gain.change == "stragglers=none" and not gain.upper_bound and gain.low_ms > 0 and not entry.stragglers.ranks:
            yield f"nobody is named: {gain.sentence}"


class Scores:
    """What is counted over all settings."""

    def __init__(self) -> None:
        self.causes: dict[int, dict[str, Counter[str]]] = {size: defaultdict(Counter) for size in SIZES}
        self.stragglers: dict[str, Counter[str]] = defaultdict(Counter)
        self.equal: dict[int, Counter[str]] = defaultdict(Counter)
        self.apart: list[float] = [0.0]
        self.stopwatch: dict[str, list[float]] = defaultdict(list)
        self.load: list[float] = []
        self.complaints: list[str] = []

    def add(self, setting: Setting, folder: Path, names: Sequence[str], *, reports: bool) -> None:
        """Score the launches of a setting."""
        launches = {name: read(folder, name) for name in names}
        for name, own in launches.items():
            self.apart += [apart(each.account) for each in own]
            against_stopwatch(own, self.stopwatch)
            self.load += [each.stopwatch["load"] for each in own if each.stopwatch]
            self._stragglers(setting, folder, name, own)
        reference = [each.account for each in launches.pop(REFERENCE)]
        for name, own in launches.items():
            for size in SIZES:
                for first in range(0, len(reference) - size + 1, size):
                    sides = reference[first : first + size], [each.account for each in own[first : first + size]]
                    compared = compare_accounts(*sides)
                    changed = abs(sum(part.change_ms for part in compared.parts) - compared.step.change_ms)
                    self.apart.append(changed / compared.step.reference_ms)
                    verdict = judged(setting.causes[name], setting.slow_rank, compared.causes)
                    self.causes[size][name][verdict] += 1
                    say(f"{verdict:6s} {size}+{size} {folder.name} {name}: {changes(compared)}")
            if reports:
                self.complaints += [f"{folder.name} {name}: {said}" for said in complaints(folder, name)]
        for name, accounts in {
            REFERENCE: reference,
            **{name: [each.account for each in own] for name, own in launches.items()},
        }.items():
            for left, right in divisions(len(accounts) & ~1):
                compared = compare_accounts([accounts[at] for at in left], [accounts[at] for at in right])
                self.equal[len(left)]["named" if compared.causes else "silent"] += 1
                if compared.causes:
                    say(f"A/A    {folder.name} {name} {left}: {changes(compared)}")

    def _stragglers(self, setting: Setting, folder: Path, name: str, launches: Sequence[Launch]) -> None:
        cause = setting.causes.get(name)
        late = cause is not None and "{rank}" in cause.words
        for turn, each in enumerate(launches):
            if not late:
                key = "healthy"
            elif cause is None or not cause.delay_ms:
                key = "computes longer"
            else:
                key = "above a tenth" if cause.delay_ms > ALONG_EDGE * each.account.step_ms else "below a tenth"
            key += ", uneven" if each.uneven and key != "computes longer" else ""  # something else uses a core
            right = each.named == [setting.slow_rank] if late else not each.named
            verdict = "right" if right else "wrong" if each.named else "silent"
            if key.startswith("healthy") and any(each.uneven.startswith(f"rank {rank} ") for rank in each.named):
                verdict = "computes longer"
            self.stragglers[key][verdict] += 1
            if not right:
                step = f"step {each.account.step_ms:.0f} ms"
                say(f"{verdict:6s} straggler {folder.name} {name}/{turn:02d}: {each.named}, {key}, {step}")

    def told(self) -> int:
        """Print the figures."""
        sums = {size: sum(of_size.values(), Counter()) for size, of_size in self.causes.items()}
        even = [counts for key, counts in self.stragglers.items() if "uneven" not in key]
        targets = {"stragglers: wrong in none": not any(counts["wrong"] for counts in even)}
        for size, total in sums.items():
            if total:
                share = (total["named"] + total["beside"]) / total.total()
                targets[f"{size} against {size}: named >= {NAMED[size]:.0%}"] = share >= NAMED[size]
                targets[f"{size} against {size}: wrong in none"] = not total["wrong"]
        if equal := self.equal.get(SIZES[0]):
            targets["A/A: silent in >= 98 %"] = equal["silent"] >= 0.98 * equal.total()
        if above := self.stragglers.get("above a tenth"):
            targets["stragglers above a tenth: >= 95 %"] = above["right"] >= 0.95 * above.total()
        targets["parts add up within 0.1 %"] = max(self.apart) <= 1e-3
        targets["no report contradicts itself"] = not self.complaints
        figures = {
            "causes": {str(size): {**of_size, "all": sums[size]} for size, of_size in self.causes.items() if of_size},
            "equal_launches": self.equal,
            "stragglers": self.stragglers,
            "parts_apart": max(self.apart),
            "beyond_the_stopwatch": {
                name: np.percentile(values, (0, 50, 100)).round(4).tolist() for name, values in self.stopwatch.items()
            },
            "complaints": self.complaints,
            "load": np.percentile(self.load or [0], (0, 50, 100)).tolist(),
        }
        return plans.say("planted_causes", figures, targets)


def changes(compared: Any) -> str:
    """Return the causes with the change of the step and its parts."""
    parts = " ".join(
        f"{part.name.split()[0]} {part.change_ms:+.1f} [{part.low_ms:+.1f}, {part.high_ms:+.1f}]"
        for part in (compared.step, *compared.parts)
    )
    return f"{'; '.join(compared.causes) or '-'} | {compared.step.reference_ms:.0f} ms {parts}"


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    """Launch, unless there are launches; score; print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(2, 4), default=[2, 4], metavar="N")
    parser.add_argument("--causes", nargs="+", choices=[*CAUSES, *LINK], default=[*CAUSES, *LINK], metavar="CAUSE")
    parser.add_argument("--settings", nargs="+", choices=[each.named() for each in SETTINGS], metavar="SETTING")
    least = 4 if "--quick" in sys.argv else 8
    parser.add_argument("--launches", type=int, default=least, metavar="N", help="of the reference and of every cause")
    parser.add_argument("--no-reports", action="store_true", help="score accounts alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs there; what is there is not made again")
    parser.add_argument("--score", type=Path, metavar="DIR", help="score the runs of an earlier `--keep`")
    words = parser.parse_args()
    sys.path.insert(0, str(ROOT / "aorta" / "recording" / "injected"))  # as `aorta record` has it, for forked ranks
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    scores, settings = Scores(), [each for each in SETTINGS if each.ranks in words.ranks]
    settings = [each for each in settings if words.settings is None or each.named() in words.settings]
    with tempfile.TemporaryDirectory() as temporary:
        base = (words.score or words.keep or Path(temporary)).absolute()
        for setting in settings[:1] if words.quick else settings:
            folder = base / setting.named()
            names = [REFERENCE, *(name for name in setting.causes if name in words.causes)]
            if words.score is None:
                begun = time.monotonic()
                for turn in range(words.launches):
                    for name in names if turn % 2 == 0 else names[::-1]:
                        if not (folder / name / f"{turn:02d}" / "run.json").exists():
                            launch(setting, name, folder, turn)
                say(f"{folder.name}: {words.launches} x {len(names)} launches, {time.monotonic() - begun:.0f} s")
            names = [name for name in names if (folder / name).exists()]
            if REFERENCE in names:
                scores.add(setting, folder, names, reports=not words.no_reports)
    return scores.told()


if __name__ == "__main__":
    sys.exit(main())
