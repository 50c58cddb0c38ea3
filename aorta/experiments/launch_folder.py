"""The folder of a plan: only launches of what was asked for stand in it, and nothing is overwritten.

    OUT/plan.json  OUT/journal.jsonl  OUT/reference/00 ...  OUT/candidate/00 ...  OUT/logs/  OUT/aside/

Before it is made, interpreters and words are checked: a wrong one must not fail every launch. Must not load torch,
start a training, delete anything, or mix two plans.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.documents.plans import Side
from aorta.errors import AnotherPlan, ConfigError
from aorta.experiments.plan import REFERENCE, Plan, PlannedLaunch
from aorta.experiments.process import launch_environment
from aorta.installation import commit_of, training_program
from aorta.records.files import decode_json, json_text, read_small, unused, whole_file
from aorta.records.run_files import (
    ENVIRONMENT_NAMES,
    ENVIRONMENT_PREFIXES,
    MANIFEST_FILE,
    RANK_FILE_GLOB,
    flatten,
    read_manifest,
)
from aorta.redaction import hide, shown_values
from aorta.version import __version__

PLAN_FILE: Final = "plan.json"
PLAN_VERSION: Final = 3
ASIDE_DIR: Final = "aside"
"""Run folders of launches that failed or were cut off; outside the sides, so that no report takes them for launches."""
_SAME_HOST: Final = ("name", "machine", "cpus")
"""Machines differ in noise; the kernel may be updated."""
_TAIL_LINES: Final = 200
_TAIL_BYTES: Final = 16_384
_ERROR: Final = re.compile(r"^(\[rank\d+\]: *)?(error\b|[\w.]*(Error|Exception)\b)")
_TORCHRUNS_OWN: Final = "torch.distributed.elastic"
_TIMEOUT_S: Final = 120
"""An interpreter on a cold network disk; it is not measured."""
_PROBE: Final = (
    "import json, platform\n"
    "from importlib import metadata\n"
    "print(json.dumps({'python': platform.python_version(), 'torch': metadata.version('torch')}))\n"
)


def facts(plan: Plan) -> dict[str, dict[str, str | None]]:
    """Return side -> versions of Python, torch and the checkout, as far as they are known without a launch.

    Raises:
        ConfigError: an interpreter does not run, or has no torch.
    """
    versions: dict[str, dict[str, str | None]] = {}
    for side in plan.sides:
        if not side.uses_python:
            why = "launched by a command of its own; see the manifest of each run"
            versions[side.name] = {"python": None, "torch": None, "commit": None, "reason": why}
            continue
        done = _run([str(side.python), "-c", _PROBE], side, plan)
        commit = commit_of(None if side.tree is None else Path(side.tree))
        try:
            probed = json.loads(done.stdout)
            own = {"python": probed["python"], "torch": probed["torch"], "commit": commit, "reason": None}
        except (ValueError, KeyError, TypeError):
            message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConfigError(
                f"{side.name}.python={side.python}: cannot tell its torch ({message}). Name a Python that has torch"
            ) from None
        versions[side.name] = own
    return versions


def check_words(plan: Plan, allow_unlike: Sequence[str] = ()) -> None:
    """Let train.py compose the overrides of each side, so that a wrong one does not fail every launch, and so that no
    launch is made whose comparison would be refused.

    Args:
        allow_unlike: keys in which the sides may differ though they change the work, as the report takes them.

    Raises:
        ConfigError: with the words of train.py; or a candidate would do other work than the reference.
    """
    from omegaconf import OmegaConf

    from aorta.analysis.compare.run_comparison import OBSERVED, changes_the_work, differing, observed_steps
    from aorta.analysis.compare.verdict import Rules

    composed: dict[str, dict[str, object]] = {}
    for side in plan.sides:
        if not side.uses_python:
            continue
        program = training_program(None if side.tree is None else Path(side.tree))
        done = _run([str(side.python), *program, *plan.words_of(side), "--cfg", "job"], side, plan)
        if done.returncode:
            message = done.stderr.strip().removeprefix("error: ") or f"exit code {done.returncode}"
            words = hide(plan.words_of(side))
            for variable in [word for word in words if word.partition("=")[0].isupper()][:1]:
                message += f"\n  for a variable write env.{variable}"
            raise ConfigError(f"{side.name}: train.py does not take {shlex.join(words) or 'no arguments'}:\n{message}")
        configuration: Any = OmegaConf.to_container(OmegaConf.create(done.stdout), resolve=False)
        # What a report would compare, as far as the configuration tells.
        values: dict[str, object] = dict(flatten(configuration, "config."))
        if values.get("config.instrument.mode") != "off":
            values[OBSERVED] = observed_steps(str(values.get("config.instrument.every", 1)))
        composed[side.name] = values
    if REFERENCE not in composed:
        return  # a program of its own, whose work its first launch tells
    rules, unlike = Rules(allow_unlike=tuple(allow_unlike)), dict[str, str]()
    for name, values in composed.items():
        for difference in filter(changes_the_work, differing(composed[REFERENCE], values)):
            if not rules.allows(difference.key):
                key = difference.key.removeprefix("config.")
                unlike.setdefault(
                    key, f"{key}: {difference.reference} in the reference, {difference.candidate} in {name}"
                )
    if unlike:
        raise ConfigError(
            "\n".join(
                [
                    "the sides would not do the same work, or not be measured alike (header.observed_steps, by "
                    "instrument.every), so their comparison would be NOT COMPARABLE:",
                    *(f"  {line}" for line in unlike.values()),
                    "give all sides the same, or compare them all the same with "
                    + " ".join(f"--allow-unlike {key}" for key in unlike),
                ]
            )
        )


def _run(command: list[str], side: Side, plan: Plan) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=plan.folder,
            env={**launch_environment(), **side.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{side.name}: cannot run {command[0]}: {error}") from error


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


def host() -> dict[str, Any]:
    return {
        "name": platform.node(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def check_output(folder: Path) -> None:
    """Refuse a folder that holds something else than a plan, a run for instance.

    Raises:
        ConfigError: so, or it cannot be read.
    """
    try:
        others = [path.name for path in folder.iterdir() if not path.match(f".part.*.{PLAN_FILE}")]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}; choose another --output") from error
    if others and PLAN_FILE not in others:
        what = "the folder of a run" if MANIFEST_FILE in others else "not empty"
        raise ConfigError(f"{folder}: {what}, and no plan's ({PLAN_FILE}); choose another --output")


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
        check_output(plan.output)
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
                part.write_text(json_text(content), encoding="utf-8")
        except FileExistsError:  # another runner was quicker
            _refuse_another(path, wanted)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or plan.output}: {error.strerror or error}; choose another --output"
        ) from error


def _refuse_another(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        existing = decode_json(read_small(path), msgspec.json.Decoder(dict[str, Any]))
        if existing["plan_version"] != PLAN_VERSION:
            raise ValueError(f"plan_version {existing['plan_version']!r}, this AORTA writes {PLAN_VERSION}")
        before, after = (
            {
                key: repr(value)
                for key, value in flatten(
                    {
                        **content["asked"],
                        "versions": content["versions"],
                        "environment": content["environment"],
                        "host": {key: content["host"][key] for key in _SAME_HOST},
                    }
                )
            }
            for content in (existing, json.loads(json_text(wanted)))
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a plan ({type(error).__name__}: {error}); choose another --output") from error
    values = {key: (before.get(key, "nothing"), after.get(key, "nothing")) for key in [*before, *after]}
    different = "\n".join(f"  {key}: {old} there, {new} now" for key, (old, new) in values.items() if old != new)
    if different:
        raise AnotherPlan(
            f"{path} holds another plan, and launches of two plans must not mix:\n{different}\n"
            "give what was given there, or another --output"
        )


def run_of(folder: Path) -> tuple[str | None, str | None]:
    """Return the run id of a complete run folder and None, or None and what is missing."""
    try:
        manifest = read_manifest(folder)
        run_id, ranks = str(manifest["run_id"]), int(manifest["world_size"])
    except FileNotFoundError:
        return None, f"there is no record in {folder}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"no readable {MANIFEST_FILE} in {folder} ({type(error).__name__}: {error})"
    records = len(list(folder.glob(RANK_FILE_GLOB)))
    if records != ranks:
        return None, f"records of {records} of {ranks} ranks in {folder}"
    return run_id, None


def put_aside(plan: Plan, launch: PlannedLaunch, why: str) -> str | None:
    """Move what a launch left to `OUT/aside/SIDE/NN.WHY`; returns that path below OUT, or None if it left nothing."""
    folder = plan.run_folder(launch)
    if not folder.exists():
        return None
    target = unused(plan.output / ASIDE_DIR / f"{launch.name}.{why}")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(target)
    return str(target.relative_to(plan.output))


def last_lines(log: Path, count: int = 20) -> list[str]:
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
