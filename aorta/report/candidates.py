"""The report on a plan with several candidates: its table, `candidates.json`, and its page, which has the change of the
step of each candidate with its interval beside the reference, where the mean step of each goes, and what makes it
longer or shorter.

Must not judge: the verdicts, and which candidate to take, are those of `launch_table`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aorta.analysis.compare.verdict import Rules
from aorta.command_line import shown_path
from aorta.documents import known
from aorta.documents.comparison import Comparison
from aorta.documents.formatting import PAGE, first_upper
from aorta.documents.metrics import JOB_STEP
from aorta.errors import InputError
from aorta.records.files import NOT_UTF8, json_text, write_whole
from aorta.report.launch_table import CANDIDATE, CANDIDATES_FILE, REFERENCE, Candidates
from aorta.report.page.account_bars import PARTS, Candidate, Row, effect_rows, step_bars, waterfall
from aorta.report.page.page_content import PAGE_FILE, PRINTED_ROWS, assemble, for_scripts
from aorta.report.run_tables import LOOKS
from aorta.version import __version__


def report_many(folder: Path, options: argparse.Namespace, rules: Rules) -> str:
    """Return the table of a plan, and write `candidates.json` and the page.

    Raises:
        InputError: an option that is about two sides, a folder that cannot be read, or an output that cannot be
            written.
    """
    for name in ("fail_on", "log", "append"):
        if getattr(options, name):
            raise InputError(
                f"--{name.replace('_', '-')}: is about one side or two, and {folder} holds many; name them, as in "
                f"aorta report --{REFERENCE} {folder / REFERENCE} --{CANDIDATE} {folder / f'{CANDIDATE}-1'}"
            )
    compared = Candidates.read(folder, rules)
    output = Path(options.output or Path("reports", folder.resolve().name))
    path = output / CANDIDATES_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(path, json_text(compared.as_json()).encode())
        if options.html:
            path = output / PAGE_FILE
            write_candidates(compared, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return f"{compared.text()}\n{shown_path(path)}\n\n{compared.conclusion()}"


def write_candidates(compared: Candidates, path: Path) -> None:
    """Write the page of a plan to `path`, replacing what is there.

    Raises:
        OSError: `path` cannot be written.
    """
    shown = {**compared.judged, **compared.other_work}
    named = {compared.shown_name(side): entry for side, entry in compared.entries.items()}
    reference = next((comparison.metrics[JOB_STEP].reference.value for comparison in shown.values()), None)
    rows, band = effect_rows(
        Candidate(REFERENCE, None, PAGE.quantity(reference, "ms"), "", ""),
        [_candidate(compared, side) for side in compared.comparisons],
        compared.rules.margin,
    )
    heading, _, why = compared.conclusion().partition("\n")
    context = {
        "printed_rows": PRINTED_ROWS,
        "version": __version__,
        "numbers_in": CANDIDATES_FILE,
        "heading": first_upper(heading),
        "title": str(compared.folder),
        "sentence": first_upper(" ".join(why.split())),
        "tone": "good" if compared.best else "open",
        "symbol": "\u2713" if compared.best else "",
        "alerts": compared.alerts,
        "rows": rows,
        "band": band,
        "bars": step_bars(named),
        "parts_of_a_step": PARTS,
        "accounts": [_account(compared, side) for side in compared.comparisons],
        "table": compared.table(),
    }
    data = {**for_scripts(), "timelines": [], "kindColors": {}}
    html = assemble("candidates.html.jinja", context, [], data)
    write_whole(path, html.encode("utf-8", errors=NOT_UTF8))


def _candidate(compared: Candidates, side: str) -> Candidate:
    comparison, name = compared.comparisons[side], compared.names[side]
    if not isinstance(comparison, Comparison):
        return Candidate(name, None, "", "not comparable", "open")
    step, (tone, _) = comparison.metrics[JOB_STEP], LOOKS[comparison.verdict]
    note = "recommended" if side == compared.best else compared.verdict(side)
    return Candidate(name, step.test.effect, PAGE.quantity(step.candidate.value, "ms"), note, tone)


def _account(compared: Candidates, side: str) -> tuple[str, str, list[Row]]:
    """Return the name of a candidate, what made its step longer or shorter, or why it was not compared, and from the
    reference's step to its own, part by part.
    """
    comparison = compared.comparisons[side]
    if not isinstance(comparison, Comparison):
        return compared.names[side], comparison, []
    sentence = comparison.sentence or "no part of the step is certain to have changed."
    return compared.names[side], sentence.replace("->", "\u2192"), waterfall(known(comparison.account))
