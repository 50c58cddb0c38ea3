"""Predicts step time with changes made that cannot be launched, from the record of a run, and prices its communication.

    program = read_program("artifacts/cuda")
    predict(program, parse_changes(["network.bandwidth=x2", "rank.3.late_ms=-5"])).gain_ms

docs/dev/what-if-model.md has the model, its assumptions and its measured errors. Must not launch anything.
"""

from aorta.whatif.changes import parse_changes
from aorta.whatif.prediction import Prediction, Value, predict
from aorta.whatif.program import RunProgram
from aorta.whatif.read_program import program_of, read_program

__all__ = [
    "Prediction",
    "RunProgram",
    "Value",
    "parse_changes",
    "predict",
    "program_of",
    "read_program",
]
