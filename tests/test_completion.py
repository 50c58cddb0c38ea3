"""What bash completes, asked of a real bash with the lines that docs/running.md gives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aorta.completion import overrides

SCRIPTS = Path(sys.executable).parent
ASK = """
eval "$(register-python-argcomplete aorta)"
COMP_LINE=$1 COMP_POINT=${#1}
read -ra COMP_WORDS <<<"$1"
[[ $1 == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
complete -p aorta >/dev/null || exit 9
_python_argcomplete aorta "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(line: str) -> list[str]:
    """What bash offers for the end of a line, without the space it may put behind."""
    assert (SCRIPTS / "aorta").exists(), "aorta is not installed in this environment"
    own = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", ASK, "bash", line], capture_output=True, text=True, env=own, check=True)
    return [word.strip() for word in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("aorta re", {"report"}),
        ("aorta report --mark", {"--markdown"}),
        ("aorta ab --candi", {"--candidate"}),
        ("aorta train training.max_st", {"training.max_steps="}),
        ("aorta train instrument.mo", {"instrument.mode=dedicated", "instrument.mode=off"}),
        ("aorta train parallel.overl", {"parallel.overlap=true", "parallel.overlap=false"}),
        ("aorta train --nproc", {"--nproc_per_node"}),
    ],
)
def test_bash_completes_commands_options_and_keys(line: str, offered: set[str]) -> None:
    assert offered <= set(completed(line))


def test_bash_completes_values_behind_the_equals_sign() -> None:
    assert set(completed("aorta train parallel=fsd")) >= {"fsdp", "fsdp1", "fsdp_tp"}


def test_keys_of_options_that_were_not_chosen_are_left_out() -> None:
    every, ddp = set(overrides({})), set(overrides({"parallel": "ddp"}))
    assert "parallel.reshard_after_forward=true" in every - ddp
    assert "parallel.overlap=true" in ddp
    assert "label=" in every
