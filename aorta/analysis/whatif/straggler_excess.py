"""By how much a rank is slower than the typical one, step after step.

In every single step one rank is the slowest, also where all are alike: what comes and goes is noise, and no straggler.
Must not change a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.program import Column

_DEVIATION_PER_MAD: Final = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
_ERROR_OF_MEDIAN: Final = 1.2533
"""Standard error of the median of normal values over that of their mean."""
_SURE: Final = 3.0
"""An excess counts where it is more than so many standard errors."""


def lasting_excess_ns(host_ns: Sequence[Column]) -> Ints:
    """By how much each rank's own time before each operation, median over steps, exceeds that of the typical rank.

    Args:
        host_ns: of each step, shape (operations, ranks).

    Returns:
        Nanoseconds, shape (operations, ranks), 0 where the difference is within its error. The typical rank is the
        lower median of the ranks.
    """
    return np.stack([_of_operation(np.stack([step[at] for step in host_ns])) for at in range(len(host_ns[0]))])


def _of_operation(own_ns: Column) -> Ints:
    """Of one operation; `own_ns` has shape (steps, ranks)."""
    medians: Floats = np.median(own_ns, axis=0)
    deviation = np.median(np.abs(own_ns - medians), axis=0) * _DEVIATION_PER_MAD
    error = _ERROR_OF_MEDIAN * deviation / np.sqrt(len(own_ns))
    typical = np.argsort(medians, kind="stable")[(len(medians) - 1) // 2]
    excess = medians - medians[typical]
    lasting = excess > _SURE * np.hypot(error, error[typical])
    return np.where(lasting, np.rint(excess), 0).astype(np.int64)
