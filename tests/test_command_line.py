"""How a command ends, what it prints and in which colours, and what bash completes."""

from __future__ import annotations

import ast
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import pytest

from aorta import commands
from aorta.command_line import command, to_stderr, to_stdout
from aorta.commands import overrides
from aorta.errors import GateFailed, Inconclusive, InputError, RunIncomplete, ToolMissing
from aorta.terminal_style import Style, mark_of, style_of, table
from tests.analysis.compare.builders import launch_set
from tests.runs import HANGS_S, ROOT, environment, finished


def test_there_are_sixty_options_at_most_and_none_that_is_refused() -> None:
    """`aorta train` has four of its own: --nproc_per_node, --config, --override, --enable-rocm-metrics."""
    parsers = {name: entry.options() for name, entry in commands.COMMANDS.items() if entry.parser is not None}
    options = [(name, word) for name, own in parsers.items() for a in own._actions for word in a.option_strings[:1]]
    assert sum(word != "-h" for _, word in options) + 4 <= 60
    refused = [(name, word) for name, words in commands.REMOVED.items() for word in words]
    assert not {(name, word) for name, own in parsers.items() for word in own._option_string_actions} & set(refused)


def test_an_error_is_one_line_and_its_exit_code_and_a_bug_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    @command()
    def main(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 7

    codes = {InputError: 2, GateFailed: 3, Inconclusive: 4, RunIncomplete: 5, ToolMissing: 127}
    assert {error: main(error("no file")) for error in codes} == codes
    assert capsys.readouterr() == ("", "error: no file\n" * len(codes))
    assert main(None) == 7
    with pytest.raises(ZeroDivisionError):
        main(ZeroDivisionError())


def test_what_is_printed_moves_no_cursor_and_turns_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    ours = "\033[1m \033[31m \033[1;32m \033[0m"
    hostile = f"a\033]0;title\007\033[2J\r\x9b1m\u202eb\033[8mc{ours}"
    shown = r"a\u001b]0;title\u0007\u001b[2J\u000d\u009b1m\u202eb\u001b[8mc" + ours.replace("\033", r"\u001b")
    to_stdout(f"{Style(enabled=True).bold('title')}\n\t{hostile} é")
    to_stderr(hostile)
    assert capsys.readouterr() == (f"\033[1mtitle\033[0m\n\t{shown} é\n", f"{shown}\n")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A process of AORTA's."""
    code = f"from aorta.command_line import begin_process\nbegin_process()\n{code}"
    return finished([sys.executable, "-c", code])


def test_a_warning_of_a_package_is_one_clean_line() -> None:
    done = python("import warnings; warnings.warn('no glyph \\x1b[2J in HF_TOKEN=hunter2x', UserWarning)")
    assert (done.returncode, done.stderr) == (0, "warning: no glyph \\u001b[2J in HF_TOKEN=...\n")


def test_only_the_functions_that_clean_it_print() -> None:
    found = []
    for path in sorted((ROOT / "aorta").rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call, name in ((call, ast.unparse(call.func)) for call in calls):
            prints = name in ("print", "sys.stdout.write", "sys.stderr.write", "tqdm.write", "self._bar.write")
            if prints and "printable(" not in ast.unparse(call.args[0]):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    # The first prints a page of ours; the second speaks where AORTA cannot be imported.
    ours = ("scripts/config_reference.py", "aorta/recording/injected/sitecustomize.py")
    assert [place for place in found if not place.startswith(ours)] == []


def test_the_exit_code_survives_a_stderr_that_cannot_be_written_to() -> None:
    main = "import os, sys\nfrom aorta.commands import main\n"
    assert (
        python(f"{main}os.close(2); os.open('/dev/full', os.O_WRONLY)\nsys.exit(main(['report', 'gone']))").returncode
        == 2
    )


def test_ctrl_c_in_an_import_is_no_traceback() -> None:
    assert python("raise KeyboardInterrupt").stderr == "interrupted\n"
    said = python("raise KeyError(3)").stderr
    assert said.startswith("Traceback ")
    assert said.endswith("KeyError: 3\n")


def test_ctrl_c_ends_a_process_that_has_not_heard_of_it() -> None:
    code = (
        "import time\nfrom aorta.command_line import begin_process\nbegin_process()\n"
        "try:\n    print('ready', flush=True)\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    time.sleep(600)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=HANGS_S)[1]
    assert (process.returncode, said) == (130, "interrupted, and ended at once\n")


def test_a_process_ends_with_the_one_that_started_it() -> None:
    child = (
        "import time\nfrom aorta.command_line import end_with_parent\nend_with_parent({parent})()\n"
        "print(1, flush=True)\ntime.sleep(600)"
    )
    before = subprocess.run([sys.executable, "-c", child.format(parent=-1)], timeout=HANGS_S, check=False)
    assert before.returncode == -signal.SIGTERM  # its parent has ended by then
    code = f"import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}.format(parent=os.getpid())])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"1\n"
        parent.kill()
        assert parent.stdout.read() == b""  # the end of the file: the child had it open


@pytest.mark.parametrize("option", ["--help", "--cfg"])
def test_nobody_reads_what_train_prints(option: str) -> None:
    words = [sys.executable, str(ROOT / "train.py"), *([option] if option == "--help" else [option, "job"])]
    read, write = os.pipe()
    os.close(read)
    own = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=HANGS_S, check=False, env=own)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_outside_the_environment_a_script_says_how_to_make_one(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    for program in ("train.py", "analysis/overlap_report.py"):
        words = [str(tmp_path / "bare" / "bin" / "python"), str(ROOT / program), "x"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 127
        assert "run `bash scripts/setup.sh`, then `source .venv/bin/activate`" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_mistyped_option_and_a_command_without_two_hyphens_are_answered_with_what_to_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        commands.main(["report", "--lable", "x"])
    assert capsys.readouterr().err.splitlines()[-1] == "--lable: did you mean --label?"
    assert commands.main(["record", "out", "torchrun", "--nproc_per_node", "2", "my.py"]) == 2
    said = "error: put -- before the command: aorta record out -- torchrun --nproc_per_node 2 my.py\n"
    assert capsys.readouterr().err == said


def test_a_folder_that_cannot_be_written_is_refused_before_the_command_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("mine")
    started = tmp_path / "started"
    for out in ("taken", "taken/run"):
        assert commands.main(["record", str(tmp_path / out), "--", "touch", str(started)]) == 2
        assert f"error: {tmp_path / out}: cannot be written: " in capsys.readouterr().err
    assert not started.exists()
    assert (tmp_path / "taken").read_text() == "mine"


SCRIPTS = Path(sys.executable).parent
ASK = """
eval "$(register-python-argcomplete aorta)"
complete -p aorta >/dev/null || exit 9
for COMP_LINE; do
    COMP_POINT=${#COMP_LINE}
    read -ra COMP_WORDS <<<"$COMP_LINE"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _python_argcomplete aorta "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    printf '%s ' "${COMPREPLY[@]}"
    echo
done
"""
OFFERED = {
    "aorta re": {"report"},
    "aorta report --mark": {"--markdown"},
    "aorta ab --candi": {"--candidate"},
    "aorta train training.max_st": {"training.max_steps="},
    "aorta train parallel.overl": {"parallel.overlap=true", "parallel.overlap=false"},
    "aorta train --nproc": {"--nproc_per_node"},
    "aorta train parallel=fsd": {"fsdp", "fsdp1", "fsdp_tp"},  # behind the equals sign
}


def test_bash_completes_commands_options_and_keys() -> None:
    assert (SCRIPTS / "aorta").exists(), "aorta is not installed in this environment"
    own = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", ASK, "bash", *OFFERED], capture_output=True, text=True, env=own, check=True)
    for (line, offered), found in zip(OFFERED.items(), done.stdout.splitlines(), strict=True):
        assert offered <= set(found.split()), line


def test_keys_of_options_that_were_not_chosen_are_left_out() -> None:
    every, ddp = set(overrides({})), set(overrides({"parallel": "ddp"}))
    assert "parallel.reshard_after_forward=true" in every - ddp
    assert "parallel.overlap=true" in ddp
    assert "label=" in every


def terminal(columns: int) -> tuple[int, int]:
    """The two ends of a pseudo-terminal: ours, and the program's."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    return ours, its


def on_terminal(words: list[str], folder: Path, **extra: str) -> str:
    """What a program leaves on a pseudo-terminal of 120 columns."""
    ours, its = terminal(120)
    own = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    process = subprocess.Popen(words, cwd=folder, stdout=its, stderr=its, env=own | {"TERM": "xterm"} | extra)
    os.close(its)
    said = b""
    with suppress(OSError):  # EIO: the program has closed the terminal
        while piece := os.read(ours, 4096):
            said += piece
    os.close(ours)
    assert process.wait() == 0, said.decode()
    return "\n".join(line.rpartition("\r")[2] for line in said.decode().split("\r\n"))  # without bars of progress


PIPE, TERMINAL = False, True


@pytest.mark.parametrize(
    ("to", "words", "coloured"),
    [
        # A pipe has colour only where it is forced ...
        (PIPE, {}, False),
        (PIPE, {"FORCE_COLOR": "1"}, True),
        (PIPE, {"CLICOLOR_FORCE": "1"}, True),
        (PIPE, {"FORCE_COLOR": "0"}, False),
        (PIPE, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (PIPE, {"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
        # ... and a terminal unless it is refused.
        (TERMINAL, {"TERM": "xterm"}, True),
        (TERMINAL, {"TERM": "dumb"}, False),
        (TERMINAL, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (TERMINAL, {"CLICOLOR": "0"}, False),
        (TERMINAL, {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_what_has_colour(to: bool, words: Mapping[str, str], coloured: bool) -> None:
    ours, its = terminal(80)
    with os.fdopen(its, "w") as opened, os.fdopen(ours):
        found = style_of(opened if to is TERMINAL else io.StringIO(), words)
    assert found.enabled is coloured
    assert found == Style(coloured, 80, 80) or to is PIPE


def test_verdicts_are_told_apart_without_colour() -> None:
    verdicts = ("regression", "improvement", "equivalent", "inconclusive", "shifted", "not tested")
    assert len({mark_of(verdict) for verdict in verdicts}) == len(verdicts)
    assert Style().verdict("regression", "x regression") == "x regression"
    assert Style(enabled=True).verdict("regression", "x") != Style(enabled=True).verdict("improvement", "x")


@pytest.mark.thorough
def test_a_report_says_the_same_on_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    launch_set(tmp_path / "plan" / "reference", (0.8, 0.81, 0.82, 0.83))
    launch_set(tmp_path / "plan" / "candidate", (0.6, 0.61, 0.62, 0.63))
    words = [sys.executable, "-m", "aorta", "report", "plan/reference", "plan/candidate", "--no-html"]
    seen = on_terminal(words, tmp_path)
    assert "\033[1;31m[x] More exposed communication\033[0m" in seen
    plain = re.sub(r"\033\[[0-9;]*m", "", seen)
    assert max(map(len, plain.splitlines()[:-2])) <= 100  # without the commands to be copied
    piped = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment(), check=True).stdout
    assert piped == plain == on_terminal(words, tmp_path, NO_COLOR="1")


def test_the_words_of_a_last_column_go_on_below_and_no_first_cell_is_broken_for_them() -> None:
    rows = [["part", "ms", "of it"], ["forward", "6.9", ""], ["idle", "45.2", "unexplained, most of it between data"]]
    assert table(rows, right=[1], width=45) == [
        "part       ms  of it",
        "forward   6.9",
        "idle     45.2  unexplained, most of it\n               between data",
    ]
