"""`torchrun train.py ...`: the command `aorta train` of a checkout. `python train.py --help` explains the overrides."""

from __future__ import annotations

import sys

from aorta.commands import script

if __name__ == "__main__":
    sys.exit(script("train"))
