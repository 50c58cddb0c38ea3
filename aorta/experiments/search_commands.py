"""The commands `aorta study` and `aorta tune`: settings launched against one base in turn, and the best judged.

`study` launches every combination of the values given:

    OUT/launches/    the plan of the base and the cells, in turn
    OUT/study.json   every cell with its comparison; the recommended one, or why there is none
    OUT/study.csv    a row a cell
    OUT/heat.png     step time over two keys, where two are varied

`tune` launches what the replay of a base run predicts to be faster:

    OUT/base/       a plan of one launch, from whose record is predicted; not with --from
    OUT/refine-1/   the same of the setting predicted to be best: its neighbours are predicted again, from its record
    OUT/launches/   the plan of the base and the candidates, in turn
    OUT/tune.json   proposals, comparisons, the recommendation or why there is none

Must not recommend what was not launched or what the comparison did not call an improvement, or load pandas or start a
process before the words are known to be good.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aorta.command_line import command, to_stderr, to_stdout
from aorta.errors import EXIT_OK, InputError, RunIncomplete
from aorta.experiments import plan_command
from aorta.experiments.launch_plan import Plan, with_candidates

if TYPE_CHECKING:
    from aorta.analysis.whatif.prediction import Base
    from aorta.experiments.tune_proposals import Refined

LAUNCHES_DIR: Final = "launches"
TUNE_FILE: Final = "tune.json"
BASE_DIR: Final = "base"
REFINE_DIR: Final = "refine-{}"
TRY: Final = 1
REFINE: Final = 2
"""With 5 launches a side and the base's record 13 launches at most: less than a fifth of the 80 that the grid of DDP
takes (its 15 settings and the base)."""
_TUNE: Final = """\
Propose bucket size, prefetching and overlap from the replay of a base run, launch
the best once and predict its neighbours from that, launch the best then against the
base in turn, and recommend it if the comparison calls it an improvement of step
time; otherwise say why nothing is recommended."""
_TUNE_EXAMPLES: Final = """\
Examples
  launch the base once, predict, refine, launch base and the best 5 times each:
    aorta tune --output artifacts/tune parallel=ddp training.max_steps=40
  predict from a run that is there, given the words it was launched with:
    aorta tune --output artifacts/tune-cuda --from artifacts/cuda \\
        parallel=ddp training.max_steps=40
  variables, which no replay knows: each value is a candidate
    aorta tune --output artifacts/tune-env --env NCCL_ALGO=Ring,Tree \\
        parallel=ddp training.max_steps=40
  see the proposals, launch nothing:
    aorta tune --output artifacts/tune --from artifacts/cuda --dry-run

The same command again does what is missing. Exit codes: 0 done, with or without a
recommendation, 1 the plan cannot be run, 2 an argument or input is wrong,
5 launches are missing, 128 + n stopped by signal n. docs/search.md"""
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


def tune_parser() -> argparse.ArgumentParser:
    """Return the arguments that the command takes, up to `--`."""
    words = plan_command.command_parser(_TUNE, _TUNE_EXAMPLES)
    words.add_argument("words", nargs="*", metavar="OVERRIDE", help="of the base, for train.py; after -- also options")
    words.add_argument("--output", metavar="DIR", required=True, help="folder of the base run, the launches, tune.json")
    words.add_argument("--from", dest="recorded", metavar="RUN", help="predict from this run: its label or folder")
    words.add_argument(
        "--try", dest="tries", type=_count, default=TRY, metavar="N", help="predictions launched (default: %(default)s)"
    )
    words.add_argument(
        "--refine",
        type=_count,
        default=REFINE,
        metavar="N",
        help="how often, at most, the best prediction is launched to predict its neighbours (default: %(default)s)",
    )
    words.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="a variable; each value is a candidate, launched beside the --try; repeatable",
    )
    plan_command.add_search_arguments(words, "tune.json")
    return words


def parse_tune(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command, and its overrides."""
    return plan_command.parse_mixed(tune_parser(), arguments)


@command()
def tune(arguments: Sequence[str]) -> int:
    """Run `aorta tune`; returns its exit code (argparse itself ends with 0 or 2)."""
    return plan_command.interruptible(_tune, parse_tune(arguments))


def base_plan(options: argparse.Namespace) -> Plan:
    """Return the base alone. Raises as `plan_command.base_plan`."""
    plan = plan_command.base_plan(options, options.words, "aorta tune")
    if plan.sides[0].command is not None:
        raise InputError(
            "--plan: tune changes overrides of train.py; for another command there is aorta study env.NAME=..."
        )
    return plan


def _tune(options: argparse.Namespace) -> int:
    from aorta.experiments.launch_medians import write_json
    from aorta.experiments.recommendation import check_launches, compared, recommended, rules, unlike
    from aorta.experiments.search_report import Tuning
    from aorta.experiments.tune_proposals import TRIED, Refined, best, of_environment, read_base

    variables = of_environment(options.env)
    most = options.tries + len(variables)
    if not most:
        raise InputError("--try 0: without --env there is no candidate")
    rules(most, options.margin)  # a margin that cannot be
    plan = base_plan(options)
    check_launches(plan.launches, most, "--try and --env")

    recorded, stopped = _recorded(options, plan)
    if recorded is None:
        return EXIT_OK if stopped is None else stopped
    base, found = read_base(recorded)
    refined = Refined(found)
    if base is not None and options.tries:
        stopped = _refine(options, plan, base, refined)
        if stopped is not None:
            return stopped
    proposals = [*best(refined.proposals, options.tries, options.margin), *variables]
    tried = [one for one in proposals if one.why == TRIED]
    whole = with_candidates(plan, plan.output / LAUNCHES_DIR, tried)
    judged_by = rules(len(tried), options.margin)
    recordings = len(refined.launched) + (0 if options.recorded else 1)
    tuning = Tuning(
        recorded=recorded,
        base=base,
        proposals=proposals,
        recordings=recordings,
        judged_by=judged_by,
        launches=plan.launches,
        notes=refined.notes,
    )
    if options.dry_run:
        to_stdout(json.dumps(tuning.as_json(), indent=2) if options.json else tuning.proposals_text())
        if not options.json and tried:
            plan_command.print_launches(whole)
        return EXIT_OK
    if tried:
        to_stderr(
            f"judge: {len(tried)} of {len(proposals)} proposals are launched against the base, {plan.launches} times "
            "each"
        )
        stopped = plan_command.launch_all(whole)
        if stopped is not None:
            return stopped
        tuning.notes += unlike(recorded, whole.run_folder(next(whole.order())))
        tuning.judgements = compared(whole, judged_by)
    tuning.chosen, tuning.reason = recommended(tuning.judgements)
    write_json(plan.output / TUNE_FILE, tuning.as_json())
    to_stdout(json.dumps(tuning.as_json(), indent=2) if options.json else tuning.text(whole))
    return EXIT_OK


def _recorded(options: argparse.Namespace, plan: Plan) -> tuple[Path | None, int | None]:
    """Return the run to predict from, launched where it is not there; or None, and how the command ends."""
    if options.recorded is not None:
        from aorta.analysis.locate import is_location, locate
        from aorta.installation import checkout

        here, word = Path.cwd(), options.recorded
        root = checkout() or here
        return (Path(word) if is_location(word, here, root) else locate([word], here, root)[word]), None
    once = replace(plan, output=plan.output / BASE_DIR, launches=1)
    if not options.dry_run:
        to_stderr("record: the base is launched once, for the predictions")
    folder, stopped = _launched_once(once, dry_run=options.dry_run)
    if folder is None and stopped is None:
        if options.json:
            raise InputError(
                f"--dry-run --json: {once.output} has no record of the base yet, so there are no proposals; launch "
                "without --dry-run, or name a run with --from"
            )
        plan_command.print_launches(once)
        to_stdout("what is launched next depends on the record of this launch")
    return folder, stopped


def _launched_once(once: Plan, *, dry_run: bool) -> tuple[Path | None, int | None]:
    """Return the run folder of a plan of one launch, which is made where it is not there; None where it was stopped,
    with the exit code, and where nothing may be launched.
    """
    from aorta.experiments.launch_folder import run_of

    folder = once.run_folder(next(once.order()))
    if dry_run:
        return (folder if run_of(folder)[0] is not None else None), None
    stopped = plan_command.launch_all(once)
    return (folder, None) if stopped is None else (None, stopped)


def _refine(options: argparse.Namespace, plan: Plan, base: Base, refined: Refined) -> int | None:
    """Launch the setting that is predicted to be best, and predict its neighbours from its record, until the best one
    is known from its own; returns how the command ends where that was stopped.
    """
    from aorta.experiments.tune_proposals import leader, predicted_again, replay_of

    for number in range(1, options.refine + 1):
        best = leader(refined.proposals, options.margin)
        if best is None or best.changes in refined.launched:
            return None
        source = REFINE_DIR.format(number)
        once = with_candidates(plan, plan.output / source, [best])
        once = replace(once, sides=once.sides[1:], launches=1)
        if not options.dry_run:
            to_stderr(f"refine {number}: {best.name} is launched once, and its neighbours predicted from that")
        try:
            folder, stopped = _launched_once(once, dry_run=options.dry_run)
        except RunIncomplete as failed:
            why = " ".join(" ".join(str(failed).splitlines()[:2]).split())  # that it failed, and of what
            refined.give_up(best, f"could not be launched: {why}")
            continue
        if folder is None:
            if stopped is None:
                refined.notes.append(f"before that {best.name} is launched once, and its neighbours predicted anew")
            return stopped
        known = tuple(refined.launched)
        refined.launched.append(best.changes)
        try:
            there = replay_of(folder)
        except InputError as refused:
            refined.notes.append(f"{source}: its neighbours are not predicted anew: {refused}")
            return None
        base_ms = base.identity.replayed_ms
        refined.proposals = predicted_again(there, best, refined.proposals, base_ms, source, known)
        refined.hold(best, there.identity.replayed_ms, source)
    return None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 0")
    return int(text)
