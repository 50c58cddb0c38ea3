"""Corrects p-values for the number of metrics tested.

Must not: correct the one primary metric that was named before the runs.
"""

from __future__ import annotations

from collections.abc import Mapping


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction: rejecting every hypothesis with a corrected p <= alpha keeps the chance of even one
    false rejection at <= alpha, however the tests depend on each other (S. Holm, Scandinavian Journal of Statistics 6,
    1979, 65-70).
    """
    corrected, least = {}, 0.0
    for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[name]))
        corrected[name] = least
    return corrected
