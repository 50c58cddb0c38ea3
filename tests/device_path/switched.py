"""One build of the compiled interceptor with all mutants of `native_mutants`; a variable says which one is in force.

    folder = build()
    AORTA_MUTANT=17 XDG_CACHE_HOME=folder python ...  # the 17th mutant, in the place of the real library; 0 = none

Must not: change a source, or what `python -m aorta.instrument.native` has built.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aorta.instrument.native.build import HEADERS, SOURCE, library
from tests.device_path.native_mutants import NATIVE_MUTANTS, NativeMutant
from tests.simulated import build as simulated

VARIABLE: Final = "AORTA_MUTANT"
SWITCH: Final = f"""#pragma once
#include <cstdlib>
inline const long MUTANT = [] {{
  const char* number = std::getenv("{VARIABLE}");
  return number != nullptr ? std::atol(number) : 0L;
}}();
"""


def switched(path: Path, mutants: Sequence[NativeMutant] = NATIVE_MUTANTS) -> str:
    """A source in which each of its mutants is a conditional expression or statement. Mutants are numbered from 1.

    Raises:
        ValueError: a quote does not stand in the source once, or the texts of two mutants overlap.
    """
    text, cut = path.read_text(), len(path.read_text())
    changes: dict[tuple[int, int], list[tuple[int, NativeMutant]]] = {}
    for number, mutant in enumerate(mutants, 1):
        if mutant.path == path:
            changes.setdefault(mutant.span(), []).append((number, mutant))
    for (begin, end), own in sorted(changes.items(), reverse=True):
        if end > cut:
            raise ValueError(f"{own[0][1].name}: its text overlaps that of another mutant")
        old = text[begin:end]
        if old.rstrip().endswith((";", "}")):
            branches = "".join(f"if (MUTANT == {number}) {{ {mutant.new} }} else " for number, mutant in own)
            conditional = f"{branches}{{ {old} }}"
        else:
            branches = "".join(f"MUTANT == {number} ? ({mutant.new}) : " for number, mutant in own)
            conditional = f"({branches}({old}))"
        text, cut = text[:begin] + conditional + text[end:], begin
    return f'#include "mutant.hpp"\n{text}'


def build() -> Path:
    """Compile the library with all mutants, unless it has been; a folder to be used as XDG_CACHE_HOME.

    Raises:
        RuntimeError: the compiler refused.
    """
    from torch.utils import cpp_extension

    sources = {path.name: switched(path) for path in (SOURCE, *HEADERS)} | {"mutant.hpp": SWITCH}
    digest = hashlib.sha256("\0".join([library().name, *sources.values()]).encode()).hexdigest()[:16]
    folder = library().parent / f"mutants_{digest}"
    made = folder / "aorta" / library().name
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for name, text in sources.items():
                Path(scratch, name).write_text(text)
            cpp_extension.load(
                library().name.split(".")[0],
                [str(Path(scratch, SOURCE.name))],
                build_directory=scratch,
                extra_cflags=["-O1"],
                is_python_module=False,
            )
            (shared,) = Path(scratch).glob("*.so")
            shared.replace(made)
    device = made.with_name(simulated.library().name)
    if not device.exists():
        shutil.copy2(simulated.library(), device)
    return folder


if __name__ == "__main__":
    os.environ["PATH"] = os.pathsep.join([str(Path(os.sys.executable).parent), os.environ["PATH"]])
    print(build())  # noqa: T201
