"""The workflow of docs/compare.md: a file GitHub can read, for a repository that has a `train.py` of its own."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from typing import Any

import yaml

from aorta.analysis.gate import add_gate_arguments
from aorta.commands import COMMANDS
from tests.runs import ROOT

PAGE = (ROOT / "docs" / "compare.md").read_text()


def workflow() -> Any:
    (block,) = re.findall(r"```yaml\n(name: .*?)```", PAGE, re.DOTALL)
    return yaml.safe_load(block)


def scripts() -> list[str]:
    return [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]


def test_it_has_what_github_requires_of_a_workflow() -> None:
    found = workflow()
    assert found[True] == "pull_request"  # `on`, as YAML 1.1 reads it
    for job in found["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


def test_its_commands_are_shell_and_need_nothing_of_this_checkout() -> None:
    text = "\n".join(scripts())
    for script in scripts():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert set(re.findall(r"(?<!\S)[\w/.]+\.(?:sh|py)\b", text)) == {"train.py", "../base/train.py"}
    started = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.startswith("aorta ")]
    assert [name for _, name, *_ in started] == ["ab", "report"]
    for _, name, *arguments in started:
        _, overrides = COMMANDS[name].options().parse_known_args(arguments)
        assert not [word for word in overrides if word.startswith("-")]


def test_its_conditions_are_conditions() -> None:
    for source in (PAGE, "\n".join(scripts())):
        words = re.findall(r"--fail-on '([^']+)'", source)
        assert words
        parser = argparse.ArgumentParser()
        add_gate_arguments(parser)
        parsed = parser.parse_args([word for condition in words for word in ("--fail-on", condition)])
        assert [condition.text for condition in parsed.fail_on] == words
