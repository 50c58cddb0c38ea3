"""The command `aorta study`: settings launched against one base in turn, and the best judged.

It launches every combination of the values given:

    OUT/launches/    the plan of the base and the cells, in turn
    OUT/study.json   every cell with its comparison; the recommended one, or why there is none
    OUT/study.csv    a row a cell
    OUT/heat.png     step time over two keys, where two are varied

Must not recommend what was not launched or what the comparison did not call an improvement, or load pandas or start a
process before the words are known to be good.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from aorta.command_line import command, to_stderr, to_stdout
from aorta.errors import EXIT_OK
from aorta.experiments import plan_command
from aorta.experiments.launch_plan import with_candidates

LAUNCHES_DIR: Final = "launches"
_STUDY: Final = """\
Launch every combination of the values given against one base, in turn, and say
which is better than the base: 5 launches each, or more where a verdict on so many
cells takes more. A key or an environment variable (env.NAME) with several values is
varied; words with one value belong to every launch, the base's too. The base has
none of the varied words."""
_STUDY_EXAMPLES: Final = """\
Examples
  six cells, 5 launches each, and as many of the base:
    aorta study --output artifacts/threads env.OMP_NUM_THREADS=1,2 \\
        parallel.bucket_cap_mb=1,5,25 parallel=ddp training.max_steps=40
  a preset (channels-threads, queues-rocm, queues-cuda, buckets, prefetch):
    aorta study --output artifacts/queues --preset queues-rocm training.max_steps=40
  see the launches, start none:
    aorta study --output artifacts/queues --preset queues-rocm --dry-run

The same command again does what is missing. Exit codes: 0 done, with or without a
recommendation, 1 the plan cannot be run, 2 an argument or input is wrong,
5 launches are missing, 128 + n stopped by signal n. docs/search.md"""


def study_parser() -> argparse.ArgumentParser:
    """Return the arguments that the command takes, up to `--`."""
    words = plan_command.command_parser(_STUDY, _STUDY_EXAMPLES)
    words.add_argument(
        "words", nargs="*", metavar="KEY=VALUE[,VALUE...]", help="for train.py, or env.NAME=...; after -- also options"
    )
    words.add_argument("--output", metavar="DIR", required=True, help="folder of the launches and of what they came to")
    words.add_argument(
        "--command", metavar="COMMAND", help="launched in place of train.py, as in aorta ab; only env.NAME can vary"
    )
    words.add_argument("--preset", metavar="NAME", help="words by name; words given replace those of their key")
    plan_command.add_search_arguments(words, "study.json")
    return words


@command()
def study(arguments: Sequence[str]) -> int:
    """Run `aorta study`; returns its exit code (argparse itself ends with 0 or 2)."""
    return plan_command.interruptible(_study, plan_command.parse_mixed(study_parser(), arguments))


def _study(options: argparse.Namespace) -> int:
    from aorta.analysis.compare.verdict import least_launches
    from aorta.experiments.launch_plan import preset, read_words
    from aorta.experiments.recommendation import check_launches, compared, recommended, rules
    from aorta.experiments.search_report import Study

    asked = read_words([*preset(options.preset), *options.words])
    cells = asked.cells()
    judged_by = rules(len(cells), options.margin)  # a margin that cannot be
    base = plan_command.base_plan(options, asked.words, "aorta study", asked.environment)
    if options.launches is None and options.plan is None:  # as many as a verdict on so many cells takes
        base = replace(base, launches=max(base.launches, least_launches(judged_by.alpha)))
    check_launches(base.launches, len(cells), "every combination of the values")
    plan = with_candidates(base, base.output / LAUNCHES_DIR, cells)
    for note in asked.notes:
        to_stderr(f"note: {note}")
    if options.dry_run:
        plan_command.print_launches(plan)
        return EXIT_OK
    to_stderr(f"{len(cells)} cells against the base, {plan.launches} launches each")
    stopped = plan_command.launch_all(plan)
    if stopped is not None:
        return stopped
    found = Study(
        asked=asked, cells=cells, judged_by=judged_by, launches=plan.launches, judgements=compared(plan, judged_by)
    )
    found.chosen, found.reason = recommended(found.judgements)
    written = found.write(base.output)
    to_stdout(json.dumps(found.as_json(), indent=2) if options.json else found.text(written, plan.output))
    return EXIT_OK
