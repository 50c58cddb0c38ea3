"""The Dockerfiles against the repository and docs/gpu.md. Nothing is built: the tests need no Docker."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from aorta.commands import COMMANDS
from tests.docs.pages import ROOT, fenced

CUDA, ROCM = (ROOT / "docker" / f"{name}.Dockerfile" for name in ("cuda", "rocm"))
DEVICES = {CUDA: ["--gpus all"], ROCM: ["--device /dev/kfd", "--device /dev/dri", "--group-add video"]}
of_both = pytest.mark.parametrize("path", [CUDA, ROCM], ids=lambda path: path.name)


def instructions(path: Path, name: str) -> list[str]:
    """What follows each instruction of this name."""
    parser = DockerfileParser(fileobj=io.BytesIO(path.read_bytes()))
    return [entry["value"] for entry in parser.structure if entry["instruction"] == name]


def calls(path: Path) -> list[list[str]]:
    """The words of every command that is run while the image is built."""
    return [shlex.split(part) for run in instructions(path, "RUN") for part in run.split("&&")]


@of_both
def test_what_is_copied_and_called_is_there(path: Path) -> None:
    for copied in instructions(path, "COPY"):
        *sources, _ = [word for word in copied.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
    assert [words for words in calls(path) if words[0] == "bash"] == [["bash", "scripts/setup.sh"]]
    (command,) = instructions(path, "CMD")
    program, word, *_ = re.findall(r'"([^"]+)"', command)
    assert program == "aorta"
    assert word in COMMANDS


@of_both
def test_the_user_is_not_root_and_torch_is_the_image_s(path: Path) -> None:
    assert instructions(path, "USER") == ["aorta"]
    assert any(words[0] == "useradd" and words[-1] == "aorta" for words in calls(path))
    installed = {word for call in calls(path) if "pip" in call for word in call[call.index("install") + 1 :]}
    assert installed <= {"--no-cache-dir", "nvidia-ml-py"}, "set-up alone brings what needs torch"
    assert [call for call in calls(path) if call[-1].startswith("import torch; assert torch.version.")]
    assert path == CUDA or ["rocprofv3", "--version"] in calls(path)


@of_both
def test_versions_are_arguments(path: Path) -> None:
    arguments = dict(value.split("=") for value in instructions(path, "ARG"))
    (base,) = instructions(path, "FROM")
    assert set(re.findall(r"\$\{(\w+)\}", base)) == set(arguments) - {"USER_ID"}
    assert not re.search(r"\d", re.sub(r"\$\{\w+\}", "", base)), "a version that is no argument"


@of_both
def test_the_page_builds_each_and_gives_it_its_devices(path: Path) -> None:
    lines = [line for block in fenced(ROOT / "docs" / "gpu.md", "bash") for line in block.splitlines()]
    image = f"aorta:{path.name.split('.')[0]}"
    assert any(f"-f docker/{path.name} -t {image} ." in line for line in lines)
    starts = [line for line in lines if line.startswith("docker run") and image in line]
    assert starts
    for line in starts:
        assert all(option in line for option in (*DEVICES[path], "--ipc=host", "--shm-size"))
