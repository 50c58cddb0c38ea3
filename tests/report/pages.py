"""Pages to look at: simulated runs and launch sets, and a run whose every text is hostile."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import bokeh.plotting  # noqa: F401  the class Figure is known from here on
import msgspec
from bokeh.core import has_props
from bokeh.document import Document

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.launch_set import Subject, read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.gate import evaluate, parse_condition
from aorta.documents.comparison import Summary
from aorta.read.record import load_run
from aorta.records.schema import DeviceSample, DeviceTelemetry
from aorta.report.page.charts import Chart, document
from aorta.report.page.page_content import write_page
from aorta.report.summary import summarize
from tests.analysis.builders import (
    collective,
    footer,
    header,
    metrics,
    partial,
    simulated_run,
    step,
    write_manifest,
    write_rank,
)
from tests.rank_records import read_rank

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&<b>$$\\x$$@{what}"
"""Ends a script element, loads something, is TeX to Bokeh and a place holder to its tooltips."""


def two_sets(folder: Path) -> tuple[dict[str, LabelledRun], Summary]:
    """Launch sets whose candidate's transfers take twice as long, and the summary of their comparison with a gate.

    A fifth launch of the candidate was killed.
    """
    for side, transfer_ms, launches in (("cuda", 5.0, 4), ("rocm", 10.0, 5)):
        for at in range(launches):
            where, name = folder / side / f"{at:02d}", f"{side}-{at}"
            simulated_run(where, label=name, ranks=2, steps=12, transfer_ms=transfer_ms + at / 10, seed=at)
    killed = folder / "rocm" / "04" / "rank_1_metrics.jsonl"
    killed.write_text("".join(killed.read_text().splitlines(keepends=True)[:-1]))
    found = read_subjects({side: folder / side for side in ("cuda", "rocm")}, Rules())
    summary = summarize(found, *found)
    summary.gate = evaluate([parse_condition("overlap_ratio<-0.05")], summary.comparison)
    return {label: each.dataset for label, each in found.items()}, summary


def compared(datasets: Mapping[str, LabelledRun]) -> Summary:
    """The summary of the first as reference and the second as candidate."""
    reference, candidate = list(datasets)[:2]
    return summarize(subjects(datasets), reference, candidate)


def subjects(datasets: Mapping[str, LabelledRun]) -> dict[str, Subject]:
    """Each a run by itself."""
    return {label: Subject(dataset) for label, dataset in datasets.items()}


def page(datasets: Mapping[str, LabelledRun], summary: Summary, path: Path) -> str:
    """Write a page and read it."""
    write_page(datasets, summary, path)
    return path.read_text(encoding="utf-8")


def sampled(folder: Path) -> Path:
    """The records of a folder again, with a sample of the device in every step: its clock is half in steps 10 to 19."""
    for path in sorted(folder.glob("rank_*_metrics.jsonl")):
        record = read_rank(path)
        rank = record.header.rank
        path.unlink()
        lines = []
        for line in record.steps:
            hot, at_ns = 10 <= line.global_step < 20, line.start_mono_ns
            values = {"temp_c": 60.0 + line.global_step / 2, "power_w": 300.0 + 10 * rank, "util_pct": 97.0}
            values["sclk_mhz"] = 900.0 if hot else 1_800.0 + rank
            times = {"start_mono_ns": at_ns + 1_000, "end_mono_ns": at_ns + 2_000}
            taken = partial(DeviceSample, throttle=["thermal"] * hot, **times, **values)
            lines.append(msgspec.structs.replace(line, device=[taken]))
        head = msgspec.structs.replace(record.header, device_telemetry=DeviceTelemetry("nvml", 1.0))
        write_rank(folder, head, lines)
    return folder


def as_bokeh(charts: Sequence[Chart]) -> list[Any]:
    """The figures of charts as the package bokeh has them (`read_document`)."""
    return read_document(document([chart.model for chart in charts])[0])


def read_document(content: Any) -> list[Any]:
    """The roots of a document, read by the package, which refuses a class and a value that it does not know; a name of
    an attribute it only warns of.
    """
    with mock.patch.object(has_props.log, "warning", side_effect=AssertionError):
        return Document.from_json(content).roots


def text_of(html: str) -> str:
    """What a page says, without scripts, styles and markup."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", bare)))


def hostile_run(folder: Path, label: str) -> LabelledRun:
    """Every word that a record holds is hostile."""
    folder.mkdir()
    for rank in range(2):
        rows = [collective(HOSTILE, seq, seq * 2.0, seq * 2.0 + 1.5, group=HOSTILE) for seq in range(3)]
        rows += [collective("allreduce", 3, 7.0, 8.0, group=HOSTILE)]
        lines = [step(rank, 2, at, overlap=metrics(10, 8, 4, 2), collectives=rows) for at in range(4)]
        head = header(rank, 2, label=HOSTILE, run_id=f"run {HOSTILE}", host=HOSTILE, parallel=HOSTILE)
        write_rank(folder, head, lines, footer(4, 2, groups={HOSTILE: [0, 1]}, error=HOSTILE))
    write_manifest(
        folder,
        {"workload": {HOSTILE: HOSTILE}},
        run_id=f"run {HOSTILE}",
        warnings=[HOSTILE],
        environment={"NCCL_X": HOSTILE},
        command=HOSTILE,
    )
    return LabelledRun(label, load_run(folder))


class Parts(HTMLParser):
    """Elements with what could load something, ids, and the content of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, text: str) -> None:
        if self._in == "script":
            self.scripts[-1] += text

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]
