"""Shared libraries that stand in for builds of NCCL: they say which version they are, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def stand_in(folder: Path, code: int, build: str) -> Path:
    """Build `libnccl.so.2` in a new folder; `build` is in its bytes, so that builds of one version differ."""
    folder.mkdir(parents=True)
    source, library = folder / "nccl.cpp", folder / "libnccl.so.2"
    source.write_text(
        f'extern "C" const char build[] = "{build}";\n'
        f'extern "C" int ncclGetVersion(int* version) {{ *version = {code}; return 0; }}\n'
    )
    compiler = os.environ.get("CXX", "c++")
    words = [compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", str(source), "-o", str(library)]
    subprocess.run(words, check=True, capture_output=True)
    return library
