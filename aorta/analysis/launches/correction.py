"""Many p-values -> p-values that stand together.

Enters: p by name. Leaves: corrected p by name. Must not: correct what was named beforehand as the one primary metric.
"""

from __future__ import annotations

from collections.abc import Mapping


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction: reject where it is <= alpha, and the chance of even one false rejection among all
    is <= alpha, however the tests depend on each other (S. Holm, Scandinavian Journal of Statistics 6, 1979, 65-70).
    """
    corrected, least = {}, 0.0
    for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[name]))
        corrected[name] = least
    return corrected
