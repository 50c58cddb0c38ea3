"""The command `aorta ab`, which `scripts/ab.sh` calls too: repeats, A/B and A/A plans; and `aorta demo`, one such plan
on a bare machine in about two minutes, which ends with a verdict.

Must not say in the demo what the plan and the report do not say, or load pandas or start a process before the words
are known to be good.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from aorta.command_line import command, shown_path, to_stderr, to_stdout
from aorta.errors import EXIT_OK, AnotherPlan, RunIncomplete
from aorta.experiments.plan import Plan
from aorta.redaction import hide, shown_variables

_DESCRIPTION: Final = """\
Independent launches of train.py or of your own program, in the order A B B A A B B A ..., each in a folder of its own.

Each candidate is compared with the reference; without one the reference is repeated, and with --aa both sides are the
reference: then the noise floor is published. Running the same command again does what is missing."""
_EXAMPLES: Final = """\
Examples
  two configurations, 5 launches each, then the report:
    aorta ab --output artifacts/ab --reference parallel.overlap=true \\
        --candidate parallel.overlap=false parallel=ddp training.max_steps=40
  several candidates, and every combination of some values; the best is named:
    aorta ab --output artifacts/many --candidate parallel=fsdp --candidate 'parallel=ddp env.OMP_NUM_THREADS=2' \\
        --vary parallel.bucket_cap_mb=1,5,25 --vary env.OMP_NUM_THREADS=1,2 training.max_steps=40
  two interpreters (or tree=DIR for another checkout, env.NCCL_ALGO=Ring for a variable):
    aorta ab --output artifacts/torches --candidate python=/opt/new/bin/python training.max_steps=40
  your own script, with any launcher; aorta record records it, unless it gives {output} to aorta.record itself:
    aorta ab --output artifacts/tree --command 'torchrun --nproc_per_node 8 my.py' \\
        --candidate env.NCCL_ALGO=Tree
  the noise floor of this machine:
    aorta ab --output artifacts/noise --aa --launches 8 training.max_steps=40
  repeats of one configuration:
    aorta ab --output artifacts/repeats --launches 3 training.max_steps=40
  a container: {torchrun} would be the interpreter's torchrun; here the image has its own
    aorta ab --output artifacts/rocm tree="$PWD" \\
        launcher="docker run --rm --init -e AORTA_LAUNCH --device=/dev/kfd --device=/dev/dri \\
            -v $PWD:$PWD -w $PWD rocm/pytorch torchrun"

Leaves in DIR: plan.json, journal.jsonl, reference/NN, candidate/NN or candidate-1/NN (run folders), logs/, aside/ (what
failed or was cut off), and with --aa noise_floor.json. Exit codes: 0 done, 1 the plan cannot be run, 2 an argument is
wrong, 5 launches are missing, 128 + n stopped by signal n; otherwise the report's own. docs/compare.md"""
DEMO_LAUNCHES: Final = 4
"""A side; the fewest from which a verdict can come (docs/dev/measuring.md, section 5)."""
DEMO: Final = "artifacts/demo"
DEMO_OPTIONS: Final = (
    *("--output", DEMO),
    *("--launches", str(DEMO_LAUNCHES)),
    *("--nproc_per_node", "2"),
    *("--reference", "parallel.overlap=true", "--candidate", "parallel.overlap=false"),
)
DEMO_OVERRIDES: Final = (
    "env.OMP_NUM_THREADS=1",  # gloo's own threads need a core to run beside computation
    *("training.device=cpu", "parallel=ddp", "training.max_steps=25"),
    # Transfers that take long beside gloo's own: on two cores the real ones compete with computation.
    *("fabric=emulated", "fabric.inter_bandwidth_gb_per_s=0.05"),
)


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    words.add_argument(
        "words",
        nargs="*",
        metavar="OVERRIDE",
        help="for all sides: overrides for train.py, env.NAME=VALUE for a variable, python=FILE, tree=DIR for a "
        "checkout of AORTA, launcher=COMMAND in place of {torchrun} (launcher='{torchrun} --max-restarts 0', say); "
        "after -- also options of train.py",
    )
    words.add_argument("--output", metavar="DIR", help="folder of the plan")
    words.add_argument("--plan", metavar="FILE", help="YAML with the same keys; options here win, overrides are added")
    words.add_argument(
        "--launches",
        type=int,
        metavar="N",
        help="launches per side (default: 5; with 7 candidates or more as many as a verdict takes); 4 are enough for "
        "the step time and the exposed time of one candidate",
    )
    words.add_argument(
        "--nproc_per_node", "--nproc-per-node", type=int, metavar="N", help="ranks of a launch (default: 2)"
    )
    words.add_argument("--timeout-s", type=float, metavar="S", help="a launch that lasts longer is ended, and failed")
    words.add_argument("--aa", action="store_true", help="both sides are the reference: publish the noise floor")
    words.add_argument(
        "--report",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="report at the end, to reports/PLAN; its exit code is passed on (default: --report)",
    )
    words.add_argument(
        "--allow-unlike",
        action="append",
        default=[],
        metavar="KEY",
        help="a key in which the sides may differ though it changes the work (workload.model_dim, say), or all; "
        "repeatable; passed on to the report",
    )
    words.add_argument("--dry-run", action="store_true", help="print the launches and stop")
    words.add_argument(
        "--reference",
        dest="reference_words",
        action="append",
        default=[],
        metavar="OVERRIDES",
        help="the same of the reference alone, or command=, split as a shell would; repeatable",
    )
    words.add_argument(
        "--candidate",
        dest="candidate_words",
        action="append",
        default=[],
        metavar="OVERRIDES",
        help="a candidate, as --reference; repeatable: several candidates",
    )
    words.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="a key or env.NAME with several values; every combination is a candidate; repeatable",
    )
    words.add_argument(
        "--command",
        metavar="COMMAND",
        help="launched in place of train.py: any program, recorded by aorta record unless {output} is in it",
    )
    return words


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse options and overrides mixed, and after `--` overrides only; argparse does not take both."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_intermixed_args(arguments[:split])
    options.words += arguments[split + 1 :]
    return options


@command()
def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    from aorta.experiments.launch_folder import check_output, check_words
    from aorta.experiments.plan import launches_needed, read_plan

    plan = read_plan(options, Path.cwd())
    if options.dry_run:
        check_output(plan.output)
        check_words(plan, options.allow_unlike)
        for launch in plan.order():
            words = [*shown_variables(launch.side.environment), *hide(plan.command(launch))]
            to_stdout(f"{launch.name}: {shlex.join(words)}")
    least = launches_needed(len(plan.sides) - 1)
    if len(plan.sides) == 1:
        to_stderr("note: there is no --candidate: only the reference is launched, and nothing is compared")
    elif plan.launches < least:
        to_stderr(f"note: --launches {plan.launches}: too few for a significance test; a verdict takes {least} a side")
    commands = [word for side in plan.sides for word in side.command]
    for word in dict.fromkeys(word for word in commands if re.fullmatch(r"[^\s{}=]+\.py", word)):
        if not (plan.folder / word).exists():
            to_stderr(f"note: {word}: not found from {plan.folder}, where the command is launched")
    if options.dry_run:
        return EXIT_OK
    stopped = launch_all(plan, options.allow_unlike)
    if stopped is not None:
        return stopped
    to_stdout(f"{len(plan.sides)} x {plan.launches} launches in {shown(plan.output)}")
    if plan.aa:
        from aorta.experiments.noise_floor import publish

        to_stdout(f"\n{publish(plan)}")
    command = [*report_command(plan), *(word for key in options.allow_unlike for word in ("--allow-unlike", key))]
    if not options.report:
        to_stdout(f"\nNext: {shlex.join(command)}")
        return EXIT_OK
    from aorta.report.command import overlap_report

    to_stdout("")
    return overlap_report(command[2:])


def launch_all(plan: Plan, allow_unlike: Sequence[str] = ()) -> int | None:
    """Check a plan and start every launch that is not done yet; returns None, or 128 + n after signal n.

    Raises:
        ConfigError: the plan cannot be run. RunIncomplete: names the launches that are missing.
    """
    from aorta.experiments import launch_folder
    from aorta.experiments.launch_engine import PLAN_JOURNAL, Journal, run_plan

    if not (plan.output / launch_folder.PLAN_FILE).exists():
        launch_folder.check_words(plan, allow_unlike)
    launch_folder.open_folder(plan, launch_folder.facts(plan), launch_folder.inherited())
    in_use = "another process runs this plan; wait for it, or stop it"
    try:
        with closing(Journal(plan.output / PLAN_JOURNAL, in_use)) as journal:
            return run_plan(plan, journal)
    except OSError as error:
        raise RunIncomplete(f"{error.filename or plan.output}: {error.strerror or error}") from error


def report_command(plan: Plan) -> list[str]:
    """Return the command to run next, in the current folder: it writes to `reports/`, named after the plan."""
    if len(plan.sides) > 1:
        folder = shown_path(plan.output)
        return ["aorta", "report", str(plan.output) if folder == "." else folder]
    alone = plan.output / plan.sides[0].name
    return ["aorta", "report", shown(alone), "--output", str(Path("reports", plan.output.resolve().name))]


def shown(path: Path) -> str:
    """Return a path relative to the current folder if it is below, and never as one word, which would be a label."""
    folder = Path(os.path.relpath(path))
    return str(path if len(folder.parts) < 2 or folder.parts[0] == ".." else folder)


def demo_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Two gloo ranks on this machine train with overlapping DDP (the reference) and without overlap "
        f"(the candidate), {DEMO_LAUNCHES} launches each, in turn, on an emulated network; then the report compares "
        "them: about two minutes. No GPU is needed.",
        epilog=f"Leaves the launches in {DEMO}/, the report in reports/demo/. Launches that an earlier demo has "
        "finished are not repeated; remove the folder to start again. A demo of another version or with other "
        f"overrides is kept beside it, as {DEMO}-earlier. Exit codes: those of aorta ab and aorta report.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for both sides, as for aorta train")
    return parser


@command()
def demo(arguments: Sequence[str]) -> int:
    options = demo_parser().parse_intermixed_args(arguments)
    asked = parse([*DEMO_OPTIONS, *DEMO_OVERRIDES, *options.overrides])
    from aorta.experiments.plan import read_plan

    plan = read_plan(asked, Path.cwd())
    to_stderr(f"AORTA demo: DDP with overlap (reference) against without (candidate), {DEMO_LAUNCHES} launches each")
    try:
        stopped = launch_all(plan)
    except AnotherPlan:  # as after an update: the earlier demo is moved aside
        from aorta.records.files import unused

        kept = unused(plan.output.with_name(f"{plan.output.name}-earlier"))
        with suppress(OSError):
            plan.output.rename(kept)
        if plan.output.exists():
            raise
        to_stderr(f"{plan.output} held a demo of another version or with other overrides: it is now {kept}")
        stopped = launch_all(plan)
    if stopped is not None:
        return stopped
    from aorta.report.command import overlap_report

    code = overlap_report([shown(plan.output)])
    to_stderr("The demo turns overlap off in the candidate on purpose: a loss is what it should find.")
    return code
