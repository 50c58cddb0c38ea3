"""The command `aorta demo`: the main job on a bare machine, in about a minute, ending with a verdict.

Must not say anything that the plan and the report do not say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aorta.command_line import command, to_stderr
from aorta.errors import AnotherPlan
from aorta.experiments import plan_command
from aorta.experiments.launch_plan import CANDIDATE, REFERENCE, Plan

LAUNCHES: Final = 4
"""A side; the fewest from which a verdict can come (docs/dev/measuring.md, section 5)."""
OPTIONS: Final = (
    *("--launches", str(LAUNCHES)),
    *("--nproc_per_node", "2"),
    *("--env", "OMP_NUM_THREADS=1"),  # gloo's own threads need a core to run beside computation
    *("--reference", "parallel.overlap=true", "--candidate", "parallel.overlap=false"),
)
OVERRIDES: Final = (
    *("training.device=cpu", "parallel=ddp", "training.max_steps=25"),
    # Transfers that take long beside gloo's own: on two cores the real ones compete with computation.
    *("fabric=emulated", "fabric.inter_bandwidth_gb_per_s=0.1"),
)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = argparse.ArgumentParser(
        description="Two gloo ranks on this machine train with overlapping DDP (the reference) and without overlap "
        f"(the candidate), {LAUNCHES} launches each, in turn, on an emulated network; then the report compares them. "
        "No GPU is needed.",
        epilog="Launches that an earlier demo has finished are not repeated; remove the folder to start again. A demo "
        "of another version or with other overrides is kept beside it, as DIR-earlier. Exit codes: those of aorta ab "
        "and aorta report.",
    )
    found.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for both sides, as for aorta train")
    found.add_argument("--output", metavar="DIR", default="artifacts/demo", help="default: %(default)s")
    found.add_argument("--report", metavar="DIR", default="reports/demo", help="of the report; default: %(default)s")
    return found


@command()
def main(arguments: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    options = parser().parse_intermixed_args(arguments)
    asked = plan_command.parse([*OPTIONS, "--output", options.output, *OVERRIDES, *options.overrides])
    from aorta.experiments.plan_options import read_plan

    plan = read_plan(asked, Path.cwd())
    to_stderr(f"AORTA demo: DDP with overlap (reference) against without (candidate), {LAUNCHES} launches each")
    stopped = _launched(plan)
    if stopped is not None:
        return stopped
    from aorta.analysis.report.report_command import overlap_report

    sides = [plan_command.shown(plan.output / side) for side in (REFERENCE, CANDIDATE)]
    return overlap_report([*sides, "--brief", "--output", options.report])


def _launched(plan: Plan) -> int | None:
    """`launch_all`; a different demo in the folder, as after an update, makes room and stays whole."""
    try:
        return plan_command.launch_all(plan)
    except AnotherPlan:
        from aorta.experiments.launch_folder import unused

        kept = unused(plan.output.with_name(f"{plan.output.name}-earlier"))
        try:
            plan.output.rename(kept)
        except OSError:
            pass
        else:
            to_stderr(f"{plan.output} held a demo of another version or with other overrides: it is now {kept}")
            return plan_command.launch_all(plan)
        raise
