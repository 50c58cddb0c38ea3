"""Which launch comes when, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from aorta.distributed import provenance
from aorta.experiments.launch_plan import Plan, Side
from aorta.records.environment_variables import hide


def side(name: str, **changes: object) -> Side:
    fields: dict[str, object] = {
        "name": name,
        "words": (f"only.{name}=1",),
        "python": "/bin/py",
        "launcher": (),
        "environment": {},
        "tree": "/tree",
    }
    return Side(**fields | changes)  # type: ignore[arg-type]


def plan(*sides: Side, launches: int = 4, **changes: object) -> Plan:
    fields: dict[str, object] = {"output": Path("/out"), "folder": Path("/here"), "sides": sides, "launches": launches}
    return Plan(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("launches", "letters"),
    [(1, "AB"), (2, "ABBA"), (3, "ABBAAB"), (4, "ABBAABBA"), (5, "ABBAABBAAB")],
)
def test_two_sides_are_interleaved(launches: int, letters: str) -> None:
    order = list(plan(side("reference"), side("candidate"), launches=launches).order())
    assert "".join("A" if one.side.name == "reference" else "B" for one in order) == letters
    assert [one.order for one in order] == list(range(2 * launches))
    for name in ("reference", "candidate"):
        assert [one.number for one in order if one.side.name == name] == list(range(launches))


def test_a_linear_drift_falls_on_both_sides_alike() -> None:
    order = list(plan(side("reference"), side("candidate"), launches=8).order())
    sums = {name: sum(one.order for one in order if one.side.name == name) for name in ("reference", "candidate")}
    assert sums["reference"] == sums["candidate"]


def test_one_side_is_repeated() -> None:
    assert [one.name for one in plan(side("reference"), launches=3).order()] == [f"reference/0{n}" for n in range(3)]


def test_the_command_line_of_a_launch() -> None:
    asked = plan(side("reference"), words=("shared=1",), nproc_per_node=3, torchrun=("--max-restarts", "0"), seed=9)
    assert asked.command(next(asked.order())) == [
        *("/bin/py", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3", "--max-restarts", "0"),
        *("/tree/train.py", "shared=1", "only.reference=1", "training.seed=9"),
        *("training.output_dir=/out/reference/00", "label=null"),
    ]


def test_a_launcher_is_filled() -> None:
    words = ("docker", "run", "-v", "{plan}:{plan}", "--name", "{side}-{launch}", "{{.ID}}", "image", "torchrun")
    asked = plan(side("candidate", launcher=words))
    command = asked.command(list(asked.order())[2])
    assert command[:9] == ["docker", "run", "-v", "/out:/out", "--name", "candidate-02", "{{.ID}}", "image", "torchrun"]
    assert command[9] == "--standalone"


def test_a_prefix_keeps_the_interpreter() -> None:
    asked = plan(side("reference", launcher=("numactl", "-N", "0", "{torchrun}")))
    command = asked.command(next(asked.order()))
    assert command[:6] == ["numactl", "-N", "0", "/bin/py", "-m", "torch.distributed.run"]


@pytest.mark.parametrize("path", ["/a/b-c_d.e", "/a b/c", "/it's", "/back\\slash", "/b\\'q", "/x=1,2{}[]", "/ends\\"])
def test_hydra_reads_the_folder_back(path: str) -> None:
    asked = plan(side("reference"), output=Path(path))
    word = asked.command(next(asked.order()))[-2]
    assert OverridesParser.create().parse_override(word).value() == f"{path}/reference/00"


def test_secrets_are_not_written_down() -> None:
    secret = side(
        "candidate", environment={"HF_TOKEN": "abc", "NCCL_ALGO": "Ring"}, launcher=("run", "-e", "MY_KEY=abc")
    )
    assert "abc" not in str(plan(secret).as_json())
    assert "NCCL_ALGO': 'Ring" in str(plan(secret).as_json())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("docker", "run", "--env=HF_TOKEN=abc", "image"), ["docker", "run", "--env=HF_TOKEN=...", "image"]),
        (("-eHF_TOKEN=a=b", "--env", "MY_KEY=abc"), ["-eHF_TOKEN=...", "--env", "MY_KEY=..."]),
        (("run", "--password", "abc", "torchrun"), ["run", "--password", "...", "torchrun"]),
        (("--password", "--rm", "-e", "NCCL_ALGO=Ring"), ["--password", "--rm", "-e", "NCCL_ALGO=Ring"]),
    ],
)
def test_a_secret_is_hidden_in_every_spelling_and_place(words: tuple[str, ...], shown: list[str]) -> None:
    assert hide(words) == shown
    kept = plan(side("reference", launcher=words), torchrun=words, words=words).as_json()
    assert kept["torchrun"] == kept["words"] == kept["sides"]["reference"]["launcher"] == shown
    assert provenance.recorded_command(list(words)) == shown
