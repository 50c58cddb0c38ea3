"""`python -m aorta.plans`: repeat launches, compare two stacks, publish a noise floor. `--help` explains the words."""

from __future__ import annotations

import sys

from aorta.plans.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
