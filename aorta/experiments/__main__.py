"""`python -m aorta.experiments`: repeat launches, compare two stacks, publish a noise floor. `--help` tells how."""

from __future__ import annotations

import sys

from aorta.experiments.plan_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
