"""The one table of `scripts/gpu_check.sh`: what was found, what is allowed, and whether it holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One finding. `passed` is None where there is nothing to hold it against (for information)."""

    case: str
    what: str
    found: str
    allowed: str
    passed: bool | None


def render(rows: Sequence[Row]) -> str:
    """Aligned text with a heading and a last line that counts."""
    words = {True: "ok", False: "FAILED", None: "-"}
    lines = [("case", "what", "found", "allowed", "")]
    lines += [(row.case, row.what, row.found, row.allowed, words[row.passed]) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    failed = sum(row.passed is False for row in rows)
    checked = sum(row.passed is not None for row in rows)
    return "\n".join([*text, f"{checked - failed} of {checked} checks passed, {len(rows) - checked} for information"])


def failed(rows: Sequence[Row]) -> bool:
    """Whether a check failed, or nothing was checked at all."""
    return any(row.passed is False for row in rows) or not any(row.passed for row in rows)


def ratio_row(case: str, own: float | None, kernels: float | None) -> Row:
    """Telemetry's overlap ratio against the kernels' (docs/measuring.md, K2: within 0.02)."""
    what = "overlap ratio, telemetry / kernels"
    if own is None or kernels is None:
        return Row(case, what, f"{_number(own)} / {_number(kernels)}", "no communication kernels to compare", None)
    return Row(case, what, f"{own:.3f} / {kernels:.3f}", "within 0.02", abs(own - kernels) <= 0.02)


def duration_row(case: str, pairs: Sequence[tuple[int, int]] | None) -> Row:
    """Durations of collectives in ns, telemetry's against the kernels' (K2: within the larger of 2 % and 10 us)."""
    what = "collective, telemetry - kernel"
    if not pairs:
        why = "no collective ran a kernel" if pairs is not None else "collectives and kernels differ in number"
        return Row(case, what, "-", why, None)
    worst = max(pairs, key=lambda pair: abs(pair[0] - pair[1]) - bound_ns(pair[1]))
    off = [own - kernel for own, kernel in pairs]
    outside = sum(abs(own - kernel) > bound_ns(kernel) for own, kernel in pairs)
    found = (
        f"worst {(worst[0] - worst[1]) / 1e3:+.1f} us of {worst[1] / 1e3:.0f}, mean {sum(off) / len(off) / 1e3:+.1f} us"
    )
    return Row(case, what, f"{found}, {outside} of {len(pairs)} outside", "max(2 %, 10 us)", outside == 0)


def bound_ns(kernel_ns: int) -> float:
    """How far telemetry may be from a kernel of this length."""
    return max(0.02 * kernel_ns, 10_000)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
