"""What is checked before the first launch of a plan: do the interpreters work, and does train.py take the words?

Must not load torch, or start a training.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aorta.distributed.environment_variables import ENVIRONMENT_NAMES, ENVIRONMENT_PREFIXES, hide, shown_values
from aorta.errors import ConfigError
from aorta.experiments.launch_plan import Plan, Side
from aorta.experiments.process import launch_environment
from aorta.installation import commit_of, training_program

_TIMEOUT_S: Final = 120
"""An interpreter on a cold network disk; it is not measured."""
_PROBE: Final = (
    "import json, platform\n"
    "from importlib import metadata\n"
    "print(json.dumps({'python': platform.python_version(), 'torch': metadata.version('torch')}))\n"
)
_NOT_KNOWN: Final = "launched by a command of its own; see the manifest of each run"


def facts(plan: Plan) -> dict[str, dict[str, str | None]]:
    """Side -> versions of Python, torch and the checkout, as far as they are known without a launch.

    Raises:
        ConfigError: an interpreter does not run, or has no torch.
    """
    return {side.name: _side_facts(side, plan) for side in plan.sides}


def inherited() -> dict[str, str]:
    """Variables of the caller that change a measurement and go to every launch: a plan taken up again in another shell
    would otherwise mix two environments (W18).
    """
    recorded = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES
    }
    return shown_values(recorded)


def check_words(plan: Plan) -> None:
    """Let train.py compose the words of each side, so that a wrong one does not fail every launch.

    Raises:
        ConfigError: with the words of train.py.
    """
    for side in plan.sides:
        if not side.uses_python:
            continue
        program = training_program(None if side.tree is None else Path(side.tree))
        command = [side.python, *program, *plan.words_of(side), "--cfg", "job"]
        done = _run(command, side, plan)
        if done.returncode:
            said = done.stderr.strip().removeprefix("error: ") or f"exit code {done.returncode}"
            words = shlex.join(hide(plan.words_of(side)))
            raise ConfigError(f"{side.name}: train.py does not take {words or 'no arguments'}:\n{said}")


def _side_facts(side: Side, plan: Plan) -> dict[str, str | None]:
    if not side.uses_python:
        return {"python": None, "torch": None, "commit": None, "reason": _NOT_KNOWN}
    done = _run([side.python, "-c", _PROBE], side, plan)
    tree = None if side.tree is None else Path(side.tree)
    try:
        versions = json.loads(done.stdout)
        return {"python": versions["python"], "torch": versions["torch"], "commit": commit_of(tree), "reason": None}
    except (ValueError, KeyError, TypeError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            f"{side.name}.python={side.python}: cannot tell its torch ({said}). Name a Python that has torch"
        ) from None


def _run(command: list[str], side: Side, plan: Plan) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {**launch_environment(), **side.environment}
    try:
        return subprocess.run(
            command,
            cwd=plan.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{side.name}: cannot run {command[0]}: {error}") from error
