"""Comparisons as `summary.json` holds them, made by hand."""

from __future__ import annotations

from typing import Any


def metric(reference: float | None, candidate: float | None, unit: str = "ms", **more: Any) -> dict[str, Any]:
    known = reference is not None and candidate is not None
    return {
        "unit": unit,
        "better": "lower",
        "reference": reference,
        "candidate": candidate,
        "difference": candidate - reference if reference is not None and candidate is not None else None,
        "quotient": candidate / reference if reference and candidate is not None else None,
        "quotient_reason": None
        if known and reference
        else "the reference is 0"
        if known
        else "not available on one side",
        "judgement": "worse",
        "judgement_reason": None,
        **more,
    }


def effect(kind: str, value: float, low: float | None, high: float | None, **more: Any) -> dict[str, Any]:
    """The keys that a comparison of launches adds to a metric. The interval of the difference is that of the effect, if
    that is a difference, or else `difference_interval`.
    """
    return {
        "difference_interval": {"low": low, "high": high} if kind == "difference" else {"low": None, "high": None},
        "role": "primary",
        "launches": {"reference": 4, "candidate": 4},
        "effect": {"kind": kind, "value": value, "low": low, "high": high},
        "margin": 0.02,
        "p": 0.029,
        "p_corrected": None,
        "verdict": "regression",
        "verdict_reason": "",
        "launches_needed": None,
        **more,
    }


def comparison(launches: int = 0, **metrics: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "reference": "cuda",
        "candidate": "rocm",
        "verdict": "inconclusive",
        "verdict_reason": "1 launch a side",
        "warnings": [],
        "manifest_differences": [],
        "metrics": metrics,
    }
    if launches:
        side = [{"path": f"{number:02}", "run_id": "x"} for number in range(launches)]
        found |= {"launches": {"reference": side, "candidate": side}, "alpha": 0.05, "primary": "overlap_ratio"}
    return found
