"""`python -m aorta.instrument.native`: build the compiled part, and print its path."""

from __future__ import annotations

import sys

from aorta.command_line import command, to_stdout
from aorta.errors import EXIT_OK, AortaError
from aorta.instrument.native.build import build


@command()
def main() -> int:
    """Build; returns the exit code."""
    try:
        path = build()
    except (OSError, RuntimeError) as error:  # the folder cannot be written, or torch's build tool failed
        raise AortaError(str(error)) from error
    to_stdout(str(path))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
