"""Profile two windows where there is no room for a trace: `python -m tests.profiling.fill_a_disk FOLDER`.

A limit of the size of a file stands for a full disk. Prints, as JSON, what was logged, the errors of the files, and
what is left.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from tests.profiling.windows import files_below, listening, loop, preset

ROOM_BYTES = 1 << 16


def main(folder: Path) -> None:
    """Profile where there is no room."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))
    settings = preset("d9d", period=3, warmup=0, active=2, with_stack=True)
    with listening() as said:
        profiler = loop(folder / "traces", settings, 6)
    errors = [file.error for saved in profiler.saver.windows for file in saved.files]
    sys.stdout.write(json.dumps({"said": said, "errors": errors, "left": files_below(folder)}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
