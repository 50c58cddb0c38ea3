"""Pages to look at: runs by simulation, and the comparison of launch sets written down by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.launch_set import Subject
from aorta.analysis.documents import as_json
from aorta.analysis.gate.gate_checks import parse_condition
from aorta.analysis.load.records import load_run
from aorta.records.schema import DeviceSample, DeviceTelemetry
from tests.analysis.builders import collective, footer, header, metrics, simulated_run, step, write_manifest, write_rank
from tests.analysis.by_json import evaluate, summarize
from tests.analysis.report.by_json import write_page
from tests.rank_records import read_rank

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&<b>$$\\x$$@{what}"
"""Ends a script element, loads something, is TeX to Bokeh and a place holder to its tooltips."""
_RULE = "the launch nearest the medians of overlap_ratio and job_step_ms"


def two_runs(folder: Path, *, ranks: int = 2, steps: int = 30) -> dict[str, LabelledRun]:
    """A reference, and a candidate whose transfers take twice as long, with samples of its devices."""
    made = {
        label: simulated_run(folder / label, label=label, ranks=ranks, steps=steps, transfer_ms=transfer, seed=seed)
        for label, transfer, seed in (("cuda", 5.0, 1), ("rocm", 10.0, 2))
    }
    sampled(made["rocm"])
    return {label: LabelledRun(label, load_run(where)) for label, where in made.items()}


def compared(datasets: Mapping[str, LabelledRun]) -> dict[str, Any]:
    """The summary of the first as reference and the second as candidate."""
    reference, candidate = list(datasets)[:2]
    return summarize(subjects(datasets), reference, candidate)


def subjects(datasets: Mapping[str, LabelledRun]) -> dict[str, Subject]:
    """Each a run by itself."""
    return {label: Subject(dataset) for label, dataset in datasets.items()}


def page(datasets: Mapping[str, LabelledRun], summary: Mapping[str, Any], path: Path) -> str:
    """Write a page and read it."""
    write_page(datasets, summary, path)
    return path.read_text(encoding="utf-8")


def launched(summary: dict[str, Any], verdict: str = "regression") -> dict[str, Any]:
    """The summary as four launches a side would have it: values of `comparison` in place, the rest written by hand."""
    found = summary["comparison"]
    for number, (name, pair) in enumerate(found["metrics"].items()):
        if pair["reference"] is None or pair["candidate"] is None:
            continue
        kind = "difference" if pair["unit"] == "ratio" else "quotient"
        value = pair["difference"] if kind == "difference" else (pair["quotient"] - 1 if pair["quotient"] else None)
        wide = 0.01 + 0.004 * (number % 5)
        spread = (None, None) if value is None else (value - wide, value + wide)
        pair |= {
            "role": {"overlap_ratio": "primary", "job_step_ms": "guard"}.get(name, "secondary"),
            "interval_level": 0.95,
            "needs_launches": None,
            "effect": {"kind": kind, "value": value, "low": spread[0], "high": spread[1]},
            "difference_interval": {"low": pair["difference"] - wide, "high": pair["difference"] + wide},
            "margin": 0.02,
            "p": 0.0286,
            "p_corrected": None if name == "overlap_ratio" else 0.114,
            "verdict": verdict if name in ("overlap_ratio", "job_step_ms") else "inconclusive",
            "verdict_reason": "p = 0.029 and the effect is beyond the margin of 0.02",
            "detectable": {"power": 0.8, "effect": 0.031, "reason": None},
            "launches_needed": 6,
            "launches": {"reference": 4, "candidate": 4},
        }
    found |= {
        "verdict": verdict,
        "verdict_reason": "p = 0.029 and the effect is beyond the margin of 0.02",
        "primary": "overlap_ratio",
        "alpha": 0.05,
        "interval_level": 0.95,
        "left_out": {"reference": [], "candidate": [{"path": "plan/candidate/04", "reason": "killed (no footer)"}]},
        "launches": {
            side: [
                {
                    "path": f"plan/{side}/{at:02d}",
                    "run_id": f"{side}-{at}",
                    "overlap_ratio": found[f"{side}_overlap_ratio"] + 0.004 * (at - 1.5),
                    "job_step_ms": found["metrics"]["job_step_ms"][side] * (1 + 0.006 * (at - 1.5)),
                }
                for at in range(4)
            ]
            for side in ("reference", "candidate")
        },
        "attribution": {
            "sentence": "Exposed communication rose by 12.1 ms (mean 2.3 ms -> 14.4 ms per step). 96 % of the "
            "increase is all-reduce of 25 MB; it is transfer, not waiting for peers; 71 % of it is exposed behind the "
            "end of backward.",
            "reference": {
                "exposed_comm_ms": 2.3,
                "comm_ms": 20.0,
                "compute_comm_ms": 17.7,
                "compute_ms": 53.1,
                "achieved_tflops": 12.5,
            },
            "candidate": {
                "exposed_comm_ms": 14.4,
                "comm_ms": 20.4,
                "compute_comm_ms": 6.0,
                "compute_ms": 53.5,
                "achieved_tflops_reason": "not a known workload",
            },
            "dimensions": {"kind": [_row("allreduce", 2.3, 14.4, 1.0)]},
            "computing": [_row("block3 in backward", 8.1, 8.2, None)],
            "definition": "mean exposed_comm_ms over the steps of all ranks after warm-up, candidate minus reference",
            "causes": [
                _row("all-reduce of 25 MB, group world, 2 ranks", 2.1, 13.7, 0.96),
                _row("behind the end of backward", 1.9, 10.5, 0.71),
                _row("waiting for peers", 0.4, 0.9, 0.04),
            ],
        },
    }
    for label in (found["reference"], found["candidate"]):
        summary["datasets"][label] |= {
            "launches": 4,
            "representative": f"plan/{label}/01",
            "representative_rule": _RULE,
        }
    return summary | gated(summary)


def _row(what: str, reference_ms: float, candidate_ms: float, share: float | None) -> dict[str, Any]:
    """A row of a breakdown of exposed communication."""
    return {
        "what": what,
        "reference_ms": reference_ms,
        "candidate_ms": candidate_ms,
        "difference_ms": round(candidate_ms - reference_ms, 6),
        "share": share,
    }


def gated(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a gate says of the comparison."""
    return {"gate": as_json(evaluate([parse_condition("overlap_ratio<-0.05")], summary["comparison"]))}


def sampled(folder: Path) -> Path:
    """The records of a folder again, with a sample of the device in every step: its clock is half in steps 10 to 19."""
    for path in sorted(folder.glob("rank_*_metrics.jsonl")):
        record = read_rank(path)
        rank = record.header.rank
        path.unlink()
        lines = [
            msgspec.structs.replace(
                step,
                device=[
                    DeviceSample(
                        step.start_mono_ns + 1_000,
                        step.start_mono_ns + 2_000,
                        temp_c=60.0 + step.global_step / 2,
                        power_w=300.0 + 10 * rank,
                        sclk_mhz=900.0 if 10 <= step.global_step < 20 else 1_800.0 + rank,
                        mclk_mhz=None,
                        util_pct=97.0,
                        mem_used_bytes=None,
                        throttle=["thermal"] if 10 <= step.global_step < 20 else [],
                    )
                ],
            )
            for step in record.steps
        ]
        head = msgspec.structs.replace(record.header, device_telemetry=DeviceTelemetry("nvml", 1.0))
        write_rank(folder, head, lines)
    return folder


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
