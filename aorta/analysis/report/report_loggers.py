"""Gives the numbers of a report to loggers: medians of every dataset, and the comparison with its verdicts.

Must not compute a value that `summary.json` does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import Comparison
from aorta.analysis.documents.summary import Summary
from aorta.errors import InputError
from aorta.loggers import Logger
from aorta.loggers.by_name import missing_client, open_logger
from aorta.loggers.clients import Place
from aorta.records.run_files import REPORT_EVENTS

_FACTS = ("run_id", "path", "platform", "backend", "parallel", "instrument_mode", "manifest_hash")


def check_loggers(names: Sequence[str]) -> None:
    """Check that these loggers can be opened.

    Raises:
        InputError: their clients are not installed; says what to install.
    """
    problem = missing_client(names)
    if problem is not None:
        raise InputError(f"--log {','.join(names)}: {problem}")


def log_summary(summary: Summary, names: Sequence[str], output: Path) -> None:
    """Open each logger for the report, give it everything, and close it.

    Args:
        summary: the content of `summary.json`.
        names: of `loggers.by_name`.
        output: folder of the report; loggers that write files write them there.

    Raises:
        InputError: a logger failed; the others have got everything.
    """
    compared = known(summary.comparison)
    title = "-and-".join(summary.datasets) if compared is None else _title(compared)
    facts = {
        f"{label}.{name}": value
        for label, entry in summary.datasets.items()
        for name in _FACTS
        if (value := getattr(entry.source, name)) is not None
    }
    failed = []
    for name in dict.fromkeys(names):
        try:
            _give(open_logger(name, Place(output, title, facts, event_suffix=REPORT_EVENTS)), summary)
        except Exception as error:  # noqa: BLE001  a client may raise anything; it is raised below, by name
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise InputError(f"the report is written to {output}, but not every logger took it: {'; '.join(failed)}")


def _give(logger: Logger, summary: Summary) -> None:
    try:
        for label, values in values_of(summary):
            logger.log_summary(label, values)
    finally:
        logger.close()


def values_of(summary: Summary) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Label and values for `Logger.log_summary`: `<metric>_median` of each dataset; of the comparison `verdict`,
    and per metric `<metric>_difference`, `<metric>_p` (the p that was judged) and `<metric>_verdict`. What is null is
    left out.
    """
    for label, entry in summary.datasets.items():
        medians = {f"{name}_median": each.median for name, each in entry.described.items()}
        yield label, _known({"rank_steps": entry.count, **medians})
    compared = known(summary.comparison)
    if compared is not None:
        values: dict[str, Any] = {"verdict": compared.verdict, "verdict_reason": compared.verdict_reason}
        for name, each in compared.metrics.items():
            values |= {f"{name}_difference": each.difference}
            corrected = known(each.p_corrected)
            values |= {f"{name}_p": known(each.p) if corrected is None else corrected}
            values |= {f"{name}_verdict": known(each.verdict)}
        yield _title(compared), _known(values)


def _title(compared: Comparison) -> str:
    return f"{compared.candidate}-vs-{compared.reference}"


def _known(values: Mapping[str, Any]) -> dict[str, float | str]:
    return {name: value for name, value in values.items() if value is not None}
