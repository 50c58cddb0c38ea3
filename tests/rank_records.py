"""One rank's record as structs, whole in memory: read by the product's `stream`, sorted by what a line is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aorta.records.record_file import header_of, stream
from aorta.records.schema import Anchor, Calibration, Footer, Header, Step


@dataclass
class RankRecord:
    """`steps` are those of the training, `isolated` those of the baselines behind it; `footer` is None after a kill."""

    path: Path
    header: Header
    steps: list[Step] = field(default_factory=list)
    anchors: list[Anchor] = field(default_factory=list)
    footer: Footer | None = None
    problems: list[str] = field(default_factory=list)
    isolated: list[Step] = field(default_factory=list)
    calibrations: list[Calibration] = field(default_factory=list)


def read_rank(path: Path) -> RankRecord:
    """Read one record; raises what `header_of` and `stream` raise."""
    record = RankRecord(path, header_of(path))
    for line in stream(path, record.problems):
        match line:
            case Step(phase="train"):
                record.steps.append(line)
            case Step():
                record.isolated.append(line)
            case Anchor():
                record.anchors.append(line)
            case Calibration():
                record.calibrations.append(line)
            case Footer():
                record.footer = line
    return record
