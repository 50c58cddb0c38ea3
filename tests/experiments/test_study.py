"""`aorta study`: cells from words, variables by name, launches in turn, and which cell is recommended."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from aorta.errors import InputError
from aorta.experiments import search_commands
from aorta.experiments.launch_plan import PRESETS, preset, read_words
from aorta.records.environment_variables import KNOWN_VARIABLES, check_variable, table
from tests.experiments.conftest import Bench
from tests.runs import ROOT

TWO_BY_TWO = ("env.NCCL_ALGO=Ring,Tree", "parallel.bucket_cap_mb=10,25", "parallel=ddp", "env.NCCL_DEBUG=WARN")


def test_words_with_several_values_are_varied_and_the_others_are_everyones() -> None:
    asked = read_words(TWO_BY_TWO)
    assert asked.varied == {"env.NCCL_ALGO": ("Ring", "Tree"), "parallel.bucket_cap_mb": ("10", "25")}
    assert asked.words == ("parallel=ddp",)
    assert asked.environment == {"NCCL_DEBUG": "WARN"}
    assert [cell.name for cell in asked.cells()] == [
        "NCCL_ALGO=Ring parallel.bucket_cap_mb=10",
        "NCCL_ALGO=Ring parallel.bucket_cap_mb=25",
        "NCCL_ALGO=Tree parallel.bucket_cap_mb=10",
        "NCCL_ALGO=Tree parallel.bucket_cap_mb=25",
    ]
    assert asked.notes == ("NCCL_DEBUG: not a variable that AORTA knows; its values are passed on unchecked",)


def test_a_comma_inside_a_list_or_a_quote_varies_nothing() -> None:
    asked = read_words(["parallel.bucket_cap_mb=1,2", "profiling.steps=[1,2]", "label='a,b'"])
    assert list(asked.varied) == ["parallel.bucket_cap_mb"]
    assert asked.words == ("profiling.steps=[1,2]", "label='a,b'")
    assert read_words(["parallel.forward_prefetch=range(0,3)"]).varied["parallel.forward_prefetch"] == ("0", "1", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["training.max_steps=4"], "nothing is varied"),
        (["env.OMP_NUM_THREADS=1,,2"], "a value is empty"),
        (["env.OMP_NUM_THREADS"], "expected env.NAME=VALUE"),
        (["env.OMP_NUM_THREADS=1,1"], "a value is given twice"),
        (["env.OMP_NUM_THREADS=0,1"], "OMP_NUM_THREADS=0: threads of an operator on the CPU; a whole number from 1"),
        (
            ["env.NCCL_PROTO=LL,fast"],
            "NCCL_PROTO=fast: the only protocol that may be used; LL, LL128 or Simple;",
        ),
        (["parallel.bucket_cap_mb=interval(1,2)"], "give its values one by one"),
        (["+workload.num_layers=2,4"], "its cells would do other work than the base"),
        (["env.A-B=1,2"], "'A-B': not the name of an environment variable"),
        (["training.batch_size=8,16"], "aorta train -m training.batch_size=8,16"),
        (["workload.num_layers=2,4"], "its cells would do other work than the base"),
        (["env.A=" + ",".join(map(str, range(9))), "env.B=" + ",".join(map(str, range(9)))], "81 cells: at most 64"),
        (["parallel.bucket_cap_mb=1,2]"], "parallel.bucket_cap_mb=1,2]: "),
    ],
)
def test_what_cannot_be_studied_is_refused_with_the_reason(words: list[str], said: str) -> None:
    with pytest.raises(InputError) as refused:
        read_words(words)
    assert said in str(refused.value)


def test_every_preset_is_made_of_values_that_its_variables_take() -> None:
    for name in PRESETS:
        asked = read_words(preset(name))
        assert 1 < len(asked.cells()) <= 10
        assert asked.notes == ()
    with pytest.raises(InputError, match=r"there are channels-threads: env\.NCCL_MAX_NCHANNELS"):
        preset("fast")


def test_words_replace_those_of_a_preset() -> None:
    asked = read_words([*preset("channels-threads"), "env.NCCL_NTHREADS=512"])
    assert asked.varied == {"env.NCCL_MAX_NCHANNELS": ("4", "8", "16")}
    assert asked.environment == {"NCCL_NTHREADS": "512"}


def test_variables_take_what_their_page_says() -> None:
    assert check_variable("CUDA_DEVICE_MAX_CONNECTIONS", "32") is None
    with pytest.raises(InputError, match="a whole number from 1 to 32"):
        check_variable("CUDA_DEVICE_MAX_CONNECTIONS", "33")
    assert check_variable("NCCL_ALGO", "ring") is None
    assert check_variable("NCCL_ALGO", "^Tree") is None
    assert check_variable("NCCL_MIN_NCHANNELS", "112") is None
    for known in KNOWN_VARIABLES.values():
        assert known.takes(known.choices[0] if known.choices else str(known.least))
        assert not known.takes("-1")


def test_the_page_has_the_table_of_variables() -> None:
    assert table() in (ROOT / "docs" / "search.md").read_text(encoding="utf-8")


@pytest.fixture
def study(bench: Bench) -> list[str]:
    """The words of a study whose launches the stand-in makes: one cell is a quarter faster than the base."""
    Path("base.yaml").write_text(f"python: {bench.python}\n")
    bench.acts(**{f"candidate-4_{number:02}": {"job_step_ms": 75 + number} for number in range(5)})
    return ["--output", "study", "--plan", "base.yaml", *TWO_BY_TWO]


@pytest.mark.thorough
def test_the_best_cell_is_judged_against_the_base(
    bench: Bench, study: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_commands.study(study) == 0
    out, err = capsys.readouterr()
    assert "note: NCCL_DEBUG: not a variable that AORTA knows" in err
    assert "4 cells against the base, 5 launches each" in err
    assert bench.launched[:10] == [
        *("reference/00", "candidate-1/00", "candidate-2/00", "candidate-3/00", "candidate-4/00"),
        *("candidate-4/01", "candidate-3/01", "candidate-2/01", "candidate-1/01", "reference/01"),
    ]
    algorithms = {
        call["name"].split("/")[0]: call["env"]["NCCL_ALGO"] for call in bench.calls if call["call"] == "launch"
    }
    assert algorithms == {
        "reference": None, "candidate-1": "Ring", "candidate-2": "Ring", "candidate-3": "Tree", "candidate-4": "Tree"
    }  # fmt: skip
    assert out.splitlines()[-3] == "recommendation: NCCL_ALGO=Tree parallel.bucket_cap_mb=25"
    found = json.loads(Path("study/study.json").read_text())
    assert found["alpha_per_cell"] == pytest.approx(0.05 / 4)
    assert found["launches"] == {"per_side": 5, "total": 25}
    assert [cell["comparison"]["verdict"] for cell in found["cells"]] == [*["equivalent"] * 3, "improvement"]
    assert found["recommendation"] == {
        "side": "candidate-4", "overrides": ["parallel.bucket_cap_mb=25"], "environment": {"NCCL_ALGO": "Tree"}
    }  # fmt: skip
    *_, last = csv.DictReader(io.StringIO(Path("study/study.csv").read_text()))
    assert (last["env.NCCL_ALGO"], last["parallel.bucket_cap_mb"], last["verdict"]) == ("Tree", "25", "improvement")
    assert (float(last["base_step_ms"]), float(last["step_ms"])) == (100, 77)
    assert float(last["p"]) == pytest.approx(2 / 252)  # five against five, all apart
    assert Path("study/heat.png").stat().st_size > 5_000

    # The same command launches nothing and says the same; another study in the folder is refused.
    assert search_commands.study([*study, "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == found
    assert len(bench.launched) == 25
    assert search_commands.study([*study[:-1], "env.NCCL_DEBUG=INFO"]) != 0
    assert len(bench.launched) == 25


def test_launches_that_can_reach_no_verdict_are_refused_before_the_first(
    bench: Bench, study: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_commands.study([*study, "--launches", "4"]) == 2
    assert "with 4 candidates (every combination of the values) no verdict is possible" in capsys.readouterr().err
    assert bench.launched == []


def test_so_many_cells_are_launched_as_often_as_a_verdict_takes(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_commands.study(["--output", "study", "--preset", "prefetch", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10 * 6
    assert bench.calls == []


def test_values_that_look_like_secrets_are_hidden() -> None:
    (first, *_) = read_words(["env.MY_TOKEN=a,b"]).cells()
    assert first.shown == {"env.MY_TOKEN": "..."}
    assert first.name == "MY_TOKEN=..."


def test_variables_of_a_command_are_varied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--output", str(tmp_path), "--command", "run {output}", "env.NCCL_ALGO=Ring,Tree", "--dry-run"]
    assert search_commands.study(words) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line == f"candidate-1/00: NCCL_ALGO=Ring run {tmp_path}/launches/candidate-1/00"


def test_a_dry_run_prints_every_launch_with_its_variables(
    bench: Bench, study: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_commands.study([*study, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 25
    assert lines[1].startswith("candidate-1/00: NCCL_DEBUG=WARN NCCL_ALGO=Ring ")
    assert bench.calls == []
