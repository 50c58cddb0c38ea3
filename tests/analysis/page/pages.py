"""Pages to look at: runs by simulation, and the comparison of launch sets written down by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aorta.analysis.aggregate import Dataset
from aorta.analysis.page import write_page
from aorta.analysis.readers.run_folder import load_run
from aorta.analysis.report import summarize
from aorta.telemetry.schema import DeviceSample, DeviceTelemetry
from tests.analysis.builders import simulated_run

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&<b>$$\\x$$@{what}"
"""Ends a script element, loads something, is TeX to Bokeh and a place holder to its tooltips."""


def two_runs(folder: Path, *, ranks: int = 2, steps: int = 30) -> dict[str, Dataset]:
    """A reference, and a candidate whose transfers take twice as long."""
    return {
        label: Dataset(
            label,
            load_run(
                simulated_run(folder / label, label=label, ranks=ranks, steps=steps, transfer_ms=transfer, seed=seed)
            ),
        )
        for label, transfer, seed in (("cuda", 5.0, 1), ("rocm", 10.0, 2))
    }


def compared(datasets: Mapping[str, Dataset]) -> dict[str, Any]:
    """The summary of the first as reference and the second as candidate."""
    reference, candidate = list(datasets)[:2]
    return summarize(datasets, reference, candidate)


def page(datasets: Mapping[str, Dataset], summary: Mapping[str, Any], path: Path) -> str:
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
            "effect": {"kind": kind, "value": value, "low": spread[0], "high": spread[1]},
            "margin": 0.02,
            "p": 0.0286,
            "p_corrected": None if name == "overlap_ratio" else 0.114,
            "verdict": verdict if name in ("overlap_ratio", "job_step_ms") else "inconclusive",
            "verdict_reason": "p = 0.029 and the effect is beyond the margin of 0.02",
            "detectable": {"power": 0.8, "effect": 0.031, "reason": None},
            "launches_needed": 6,
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
            "sentence": "96 % of the 12.1 ms more exposed communication per rank-step is all-reduce of 25 MB; it is "
            "transfer, not waiting for peers; 71 % of it is exposed behind the end of backward.",
            "definition": "mean exposed_comm_ms of the rank-steps after warm-up, candidate minus reference",
            "causes": [
                {"what": what, "reference_ms": left, "candidate_ms": right, "difference_ms": right - left, "share": share}
                for what, left, right, share in (
                    ("all-reduce of 25 MB, group world, 2 ranks", 2.1, 13.7, 0.96),
                    ("behind the end of backward", 1.9, 10.5, 0.71),
                    ("waiting for peers", 0.4, 0.9, 0.04),
                )
            ],
        },
    }
    for label in (found["reference"], found["candidate"]):
        summary["datasets"][label] |= {"launches": 4, "representative": f"plan/{label}/01"}
    return summary | {
        "gate": {
            "status": "failed",
            "exit_code": 3,
            "rules": [{"rule": "overlap_ratio<-0.05", "difference": -0.3, "limit": -0.05, "status": "failed"}],
        }
    }


def with_devices(dataset: Dataset) -> Dataset:
    """The dataset with a sample in every step: a clock that falls by half in the middle third."""
    import pandas as pd

    rows = []
    header = DeviceTelemetry("nvml", 1.0)
    for row in dataset.table("rank", "global_step", "start_mono_ns", "end_mono_ns", warmup=True).itertuples():
        slow = 10 <= row.global_step < 20
        sample = DeviceSample(
            int(row.start_mono_ns) + 1000,
            int(row.start_mono_ns) + 2000,
            60.0 + row.global_step / 2,
            300.0 + 10 * row.rank,
            900.0 if slow else 1800.0 + row.rank,
            None,
            97.0,
            None,
            ["thermal"] if slow else [],
        )
        rows.append({"rank": row.rank, **{name: getattr(sample, name) for name in DeviceSample.__struct_fields__}})
    assert header.source
    frame = pd.DataFrame(rows).assign(failed=False, reason=None)
    dataset.__dict__["device_samples"] = frame.sort_values(["rank", "start_mono_ns"], ignore_index=True)
    return dataset


def text_of(html: str) -> str:
    """What a page says, without scripts, styles and markup."""
    from html import unescape

    bare = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", bare)))
