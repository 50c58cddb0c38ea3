"""The folder of a plan: only launches of what was asked for stand in it, and nothing is overwritten.

    OUT/plan.json  OUT/journal.jsonl  OUT/reference/00 ...  OUT/candidate/00 ...  OUT/logs/  OUT/aside/

Before a plan's folder is made, interpreters and words are checked: a wrong one must not fail every launch.

Must not load torch, start a training, delete anything, or mix two plans.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.errors import AnotherPlan, ConfigError
from aorta.experiments.launch_plan import Plan, PlannedLaunch, Side
from aorta.experiments.process import launch_environment
from aorta.installation import commit_of, training_program
from aorta.records.files import NOT_UTF8, decode_json, read_small, unused, whole_file
from aorta.records.run_files import (
    ENVIRONMENT_NAMES,
    ENVIRONMENT_PREFIXES,
    MANIFEST_FILE,
    RANK_FILE_GLOB,
    flatten,
    read_manifest,
)
from aorta.redaction import hide, redact, shown_values
from aorta.version import __version__

PLAN_FILE: Final = "plan.json"
PLAN_VERSION: Final = 2
"""2: a plan that is taken up again must find the same host."""
_SAME_HOST: Final = ("name", "machine", "cpus")
_PART: Final = f".part.*.{PLAN_FILE}"
_LAST_LINES: Final = 20
_TAIL_LINES: Final = 200
_TAIL_BYTES: Final = 16_384
_ERROR: Final = re.compile(r"^(\[rank\d+\]: *)?(error\b|[\w.]*(Error|Exception)\b)")
_TORCHRUNS_OWN: Final = "torch.distributed.elastic"
LOG_DIR: Final = "logs"
ASIDE_DIR: Final = "aside"
"""Run folders of launches that failed or were cut off; outside the sides, so that no report takes them for launches."""
_TIMEOUT_S: Final = 120
"""An interpreter on a cold network disk; it is not measured."""
_PROBE: Final = (
    "import json, platform\n"
    "from importlib import metadata\n"
    "print(json.dumps({'python': platform.python_version(), 'torch': metadata.version('torch')}))\n"
)
_NOT_KNOWN: Final = "launched by a command of its own; see the manifest of each run"


def facts(plan: Plan) -> dict[str, dict[str, str | None]]:
    """Return side -> versions of Python, torch and the checkout, as far as they are known without a launch.

    Raises:
        ConfigError: an interpreter does not run, or has no torch.
    """
    found: dict[str, dict[str, str | None]] = {}
    for side in plan.sides:
        if not side.uses_python:
            found[side.name] = {"python": None, "torch": None, "commit": None, "reason": _NOT_KNOWN}
            continue
        done = _run([side.python, "-c", _PROBE], side, plan)
        commit = commit_of(None if side.tree is None else Path(side.tree))
        try:
            versions = json.loads(done.stdout)
            own = {"python": versions["python"], "torch": versions["torch"], "commit": commit, "reason": None}
        except (ValueError, KeyError, TypeError):
            message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConfigError(
                f"{side.name}.python={side.python}: cannot tell its torch ({message}). Name a Python that has torch"
            ) from None
        found[side.name] = own
    return found


def inherited() -> dict[str, str]:
    """Return the variables of the caller that change a measurement and go to every launch: a plan taken up again in
    another shell would otherwise mix two environments (W18).
    """
    recorded = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES
    }
    return shown_values(recorded)


def check_words(plan: Plan) -> None:
    """Let train.py compose the overrides of each side, so that a wrong one does not fail every launch.

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
            message = done.stderr.strip().removeprefix("error: ") or f"exit code {done.returncode}"
            words = shlex.join(hide(plan.words_of(side)))
            raise ConfigError(f"{side.name}: train.py does not take {words or 'no arguments'}:\n{message}")


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


def open_folder(plan: Plan, facts: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Make the plan's folder, or find that it holds this very plan.

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
            "aorta_version": __version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **wanted,
            "order": [{"launch": launch.name, "command": hide(plan.command(launch))} for launch in plan.order()],
        }
        try:
            with whole_file(path, new=True) as part:
                part.write_text(redact(json.dumps(content, indent=2) + "\n"), encoding="utf-8", errors=NOT_UTF8)
        except FileExistsError:  # another runner was quicker
            _refuse_another(path, wanted)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or plan.output}: {error.strerror or error}; choose another --output"
        ) from error


def host() -> dict[str, Any]:
    return {
        "name": platform.node(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def run_of(folder: Path) -> tuple[str | None, str | None]:
    """Return the run id of a complete run folder and None, or None and what is missing."""
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
    """Return where the output of a launch goes; `starts`: how often it was started before."""
    again = f"-{starts + 1}" if starts else ""
    return plan.output / LOG_DIR / launch.side.name / f"{launch.number:02d}{again}.log"


def last_lines(log: Path, count: int = _LAST_LINES) -> list[str]:
    """Return the end of what a launch said."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, else its last line; torchrun's own, which only says that a
    rank has failed, does not count.
    """
    lines = [line.strip() for line in last_lines(log, _TAIL_LINES) if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and _TORCHRUNS_OWN not in line]
    return (errors or lines or ["it printed nothing"])[-1]


def _refuse_another(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        existing = decode_json(read_small(path), msgspec.json.Decoder(dict[str, Any]))
        if existing["plan_version"] != PLAN_VERSION:
            raise ValueError(f"plan_version {existing['plan_version']!r}, this AORTA writes {PLAN_VERSION}")
        different = differences(_comparable(existing), _comparable(wanted))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a plan ({type(error).__name__}: {error}); choose another --output") from error
    if different:
        raise AnotherPlan(
            f"{path} holds another plan, and launches of two plans must not mix:\n{different}\n"
            "give what was given there, or another --output"
        )


def _comparable(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must stay the same: machines, whose noise differs, but not the kernel, which may be updated."""
    host = {key: content["host"][key] for key in _SAME_HOST}
    return {**content["asked"], "versions": content["versions"], "environment": content["environment"], "host": host}


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING: Final = _Nothing()


def differences(existing: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return where two requests differ, a line per key, as in `  words: ['a=2'] there, nothing now`."""
    before, after = dict(flatten(existing)), dict(flatten(json.loads(json.dumps(now))))
    values = {key: (before.get(key, _NOTHING), after.get(key, _NOTHING)) for key in [*before, *after]}
    return "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, (old, new) in values.items() if old != new)
