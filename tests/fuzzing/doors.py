"""The doors: every place where AORTA takes a file, a folder or words from elsewhere.

A new door is one line of `DOORS`: its name, the seeds, and what opens a case. Opening gets the folder of the case and
an empty folder to write to. It gives an exit code where the door is a command, otherwise None.
Must not: catch anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.fuzzing import seeds

Open = Callable[[Path, Path], int | None]
_MODULES: Final = """
    aorta.analysis.summary aorta.analysis.compare.launch_set aorta.analysis.frames aorta.analysis.devices
    aorta.analysis.load.traces aorta.analysis.report.report_command
    aorta.analysis.report.html.page_content aorta.analysis.merge.merge_traces aorta.rpc.rpc_report
    aorta.experiments.plan_command
    aorta.experiments.launch_folder aorta.train_command matplotlib.pyplot bokeh.plotting jinja2 scipy.stats
    fsspec.implementations.local fsspec.implementations.zip fsspec.implementations.tar omegaconf
"""
"""Loaded once, before any case: what a case loads itself would count as its time and memory."""


@dataclass(frozen=True)
class Door:
    """`in_place`: it writes where its input stands."""

    name: str
    seeds: Callable[[Path], None]
    open: Open
    torch: bool = False
    in_place: bool = False


def warm() -> None:
    """Load everything that doors without torch use."""
    for name in _MODULES.split():
        import_module(name)


def _location(case: Path) -> Path:
    """The only file of a case, else its folder."""
    inside = list(case.iterdir())
    return inside[0] if len(inside) == 1 else case


def _source(case: Path, out: Path) -> None:
    """Everything that is made of a run folder or of traces, but for pictures and text."""
    from aorta import analysis
    from aorta.analysis.aggregate import LabelledRun
    from aorta.analysis.compare.launch_set import Subject
    from aorta.analysis.documents import as_json
    from aorta.analysis.load.engines import Local
    from aorta.analysis.load.locations import load_source
    from aorta.analysis.summary import summarize

    run = load_source(_location(case), Local(1))
    subject = Subject(LabelledRun("x", run))
    json.dumps(as_json(summarize({"x": subject, "y": subject}, "x", "y")), allow_nan=False)
    analysis.steps(run)
    analysis.device_samples(run)
    analysis.collectives(run)


def _report(case: Path, out: Path) -> int:
    from aorta.analysis.report.report_command import overlap_report

    words = ["--log-dir", str(_location(case)), "--label", "x", "--output", str(out), "--jobs", "1"]
    return overlap_report(words)


def _compare(case: Path, out: Path) -> None:
    from aorta.analysis.compare.launch_set import read_subjects
    from aorta.analysis.compare.verdict import Rules
    from aorta.analysis.documents import as_json
    from aorta.analysis.load.engines import Local
    from aorta.analysis.summary import summarize

    sides = {side: case / side for side in ("reference", "candidate")}
    subjects = read_subjects(sides, Rules(), Local(1))
    json.dumps(as_json(summarize(subjects, *sides, engine=Local(1))), allow_nan=False)


def _merge(case: Path, out: Path) -> int:
    from aorta.analysis.merge.merge_traces import merge_traces

    align = ("clock", "none", "start_profile")[sum(map(len, map(str, case.rglob("*")))) % 3]
    return merge_traces([str(case), "-o", str(out / "merged.json"), "--window", "all", "--check", "--align", align])


def _rpc(case: Path, out: Path) -> int:
    from aorta.rpc.rpc_report import rpc_report

    return rpc_report([str(case), "-o", str(out / "trace.json.gz"), "--check"])


def _sweep(case: Path, out: Path) -> int:
    from aorta.analysis.report.report_command import overlap_report

    return overlap_report([str(case), "--output", str(out)])


def _plan(case: Path, out: Path) -> None:
    from contextlib import closing

    from aorta.experiments.journal import PLAN_JOURNAL, Journal, read_plan_history
    from aorta.experiments.launch_folder import open_folder, run_of
    from aorta.experiments.plan_command import parse
    from aorta.experiments.plan_options import read_plan

    folder = case / "plan"
    run_of(folder / "reference" / "00")
    if folder.is_dir():
        with closing(Journal(folder / PLAN_JOURNAL, "in use")):
            history = read_plan_history(folder)
            history.done(), history.open_starts(), history.starts_of("reference/00"), history.seconds()
        open_folder(read_plan(parse(["--output", str(folder)]), case), {}, {})
    read_plan(parse(["--plan", str(case / "plan.yaml"), "--output", str(out / "plan")]), case)


def _words_of(case: Path, name: str) -> bytes:
    """What stands for words of a command line or a pipe; nothing where it is no plain file, which they never are."""
    path = case / name
    return path.read_bytes() if path.is_file() and not path.is_symlink() else b""


def _lines(case: Path) -> list[str]:
    """Words as a command line has them: bytes that are no UTF-8 arrive as surrogates, and no zero byte does."""
    raw = _words_of(case, "words.txt").replace(b"\0", b"")[:100_000]
    return [line.decode("utf-8", "surrogateescape") for line in raw.split(b"\n")]


def _configuration(case: Path, out: Path) -> int:
    from hydra.core.global_hydra import GlobalHydra

    from aorta.train_command import compose as main
    from tests.config.conftest import Noting

    words = [word for word in _lines(case) if word not in ("-m", "--multirun")]
    GlobalHydra.instance().clear()
    sys.argv = ["train.py", *(str(case / word) if word == "mine.yaml" else word for word in words)]
    return main(lambda _resolved: 0, seeds.ROOT / "config", Noting())


def _words(case: Path, out: Path) -> None:
    from aorta.analysis.locate import is_location, label_of
    from aorta.config.groups.profiling import selected_ranks
    from aorta.config.override_words import translate
    from aorta.config.templates import problem_of
    from aorta.errors import AortaError

    for word in _lines(case):
        is_location(word, out, out), label_of(word), problem_of(word)
        for takes, refusal in ((selected_ranks, ValueError), (lambda text: translate([text], out, out), AortaError)):
            try:
                takes(word)
            except refusal:
                continue


def _checkpoints(case: Path, out: Path) -> None:
    from aorta.runner.checkpoint import available, first_step
    from tests.fuzzing.checkpointed import checkpointed

    available(case)
    first_step(case, None, 0.0)
    with checkpointed(case) as (kept, _):
        kept.load(first_step(case, 3, None))


def _smi(case: Path, out: Path) -> None:
    from aorta.errors import DeviceUnreadable
    from aorta.records.device_values import from_json, from_text, json_in_output, normalised

    text = _words_of(case, "out.txt").decode("utf-8", "replace")
    for cards in (lambda: from_text(text), lambda: from_json(json_in_output(text))):
        try:
            for card in cards():
                normalised(card)
        except DeviceUnreadable:
            continue


DOORS: Final = (
    Door("kineto", seeds.kineto, _source),
    Door("rocprofv3", seeds.rocprofv3, _source),
    Door("databases", seeds.databases, _source),
    Door("records", seeds.records, _source),
    Door("report", seeds.records, _report),
    Door("launches", seeds.launches, _compare),
    Door("merge", seeds.merge, _merge),
    Door("rpc", seeds.rpc, _rpc),
    Door("sweep", seeds.sweep, _sweep),
    Door("plan", seeds.plan, _plan, in_place=True),
    Door("configuration", seeds.configuration, _configuration),
    Door("words", seeds.words, _words),
    Door("smi", seeds.smi, _smi, torch=True),
    Door("checkpoints", seeds.checkpoints, _checkpoints, torch=True),
)
