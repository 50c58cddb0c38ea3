"""Output folders of several nodes without a shared disk -> one run folder.

    python analysis/gather.py --into artifacts/both node0:/scratch/run node1:/scratch/run

Runs from any directory, installed or not. What it does is in `aorta/experiments/gather_nodes.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aorta.commands import script  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(script("gather"))
