"""The folder of a plan: what was asked for stands in it, and only launches of that plan ever do.

    OUT/plan.json  OUT/journal.jsonl  OUT/reference/00 ...  OUT/candidate/00 ...  OUT/logs/  OUT/aside/

Must not delete anything, or mix two plans.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

import aorta
from aorta.distributed.redaction import hide
from aorta.errors import AnotherPlan, ConfigError
from aorta.experiments.launch_plan import Plan, PlannedLaunch
from aorta.experiments.resume import differences, unused
from aorta.records.run_files import MANIFEST_FILE, RANK_FILE_GLOB, read_manifest
from aorta.records.untrusted_files import decode_json, read_small

PLAN_FILE: Final = "plan.json"
PLAN_VERSION: Final = 2
"""2: a plan that is taken up again must find the same host."""
_SAME_HOST: Final = ("name", "machine", "cpus")
_PART: Final = f"{PLAN_FILE}.*.part"
_LAST_LINES: Final = 20
_TAIL_BYTES: Final = 16_384
LOG_DIR: Final = "logs"
ASIDE_DIR: Final = "aside"
"""Run folders of launches that failed or were cut off; outside the sides, so that no report takes them for launches."""


def open_folder(plan: Plan, facts: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Make the plan's folder, or find that it holds this very plan.

    Args:
        facts: of each side, what `plan_checks.facts` found.
        environment: what `plan_checks.inherited` found.

    Raises:
        AnotherPlan: the folder holds another plan; the message has each key with both values.
        ConfigError: the folder holds something else.
    """
    path = plan.output / PLAN_FILE
    wanted = {"asked": plan.as_json(), "versions": dict(facts), "environment": dict(environment), "host": host()}
    try:
        if path.exists():
            _refuse_another(path, wanted)
            return
        if plan.output.exists() and any(not each.match(_PART) for each in plan.output.iterdir()):
            raise ConfigError(f"{plan.output}: not empty, and no plan's ({PLAN_FILE}); choose another --output")
        plan.output.mkdir(parents=True, exist_ok=True)
        content = {
            "plan_version": PLAN_VERSION,
            "aorta_version": aorta.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **wanted,
            "order": [{"launch": launch.name, "command": hide(plan.command(launch))} for launch in plan.order()],
        }
        if not _made(path, json.dumps(content, indent=2) + "\n"):  # another runner was quicker
            _refuse_another(path, wanted)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or plan.output}: {error.strerror or error}; choose another --output"
        ) from error


def _made(path: Path, text: str) -> bool:
    """Write a whole file where there is none; False, and nothing written, where there is one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if path.exists():
                return False
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return True


def host() -> dict[str, Any]:
    """The machine that runs the plan."""
    return {
        "name": platform.node(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def run_of(folder: Path) -> tuple[str | None, str | None]:
    """The run id of a complete run folder and None, or None and what is missing."""
    try:
        manifest = read_manifest(folder)
        run_id, ranks = str(manifest["run_id"]), int(manifest["world_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"no readable {MANIFEST_FILE} in {folder} ({type(error).__name__}: {error})"
    found = len(list(folder.glob(RANK_FILE_GLOB)))
    if found != ranks:
        return None, f"records of {found} of {ranks} ranks in {folder}"
    return run_id, None


def put_aside(plan: Plan, launch: PlannedLaunch, why: str) -> str | None:
    """Move what a launch left to `OUT/aside/SIDE/NN.WHY`.

    Returns:
        That place, seen from OUT; None if it left nothing.
    """
    folder = plan.run_folder(launch)
    if not folder.exists():
        return None
    target = unused(plan.output / ASIDE_DIR / f"{launch.name}.{why}")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(target)
    return str(target.relative_to(plan.output))


def log_file(plan: Plan, launch: PlannedLaunch, starts: int) -> Path:
    """Where the output of a launch goes; `starts`: how often it was started before."""
    again = f"-{starts + 1}" if starts else ""
    return plan.output / LOG_DIR / launch.side.name / f"{launch.number:02d}{again}.log"


def last_lines(log: Path) -> list[str]:
    """The end of what a launch said."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]


def _refuse_another(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        there = decode_json(read_small(path), msgspec.json.Decoder(dict[str, Any]))
        if there["plan_version"] != PLAN_VERSION:
            raise ValueError(f"plan_version {there['plan_version']!r}, this AORTA writes {PLAN_VERSION}")
        different = differences(_comparable(there), _comparable(wanted))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a plan ({type(error).__name__}: {error}); choose another --output") from error
    if different:
        raise AnotherPlan(
            f"{path} holds another plan, and launches of two plans must not mix:\n{different}\n"
            "give what was given there, or another --output"
        )


def _comparable(content: Mapping[str, Any]) -> dict[str, Any]:
    """What must stay as it is. Launches of two machines have no common noise, but a kernel may be updated meanwhile."""
    host = {key: content["host"][key] for key in _SAME_HOST}
    return {**content["asked"], "versions": content["versions"], "environment": content["environment"], "host": host}
