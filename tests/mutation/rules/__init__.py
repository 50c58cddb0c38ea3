"""The mutants of `scripts/mutants`, by room of AORTA: data, each with the tests that have to notice it."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import CheckedMutant
from tests.mutation.rules.calibration import CALIBRATION
from tests.mutation.rules.collectives import COLLECTIVES
from tests.mutation.rules.comparison import COMPARISON
from tests.mutation.rules.pace import PACE
from tests.mutation.rules.recording import RECORDING
from tests.mutation.rules.timeline import TIMELINE
from tests.mutation.rules.traces import TRACES

MUTANTS: Final[tuple[CheckedMutant, ...]] = (
    *TIMELINE,
    *COMPARISON,
    *COLLECTIVES,
    *TRACES,
    *RECORDING,
    *PACE,
    *CALIBRATION,
)
