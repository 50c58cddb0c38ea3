"""Output folders of several nodes without a shared disk -> one run folder.

    python analysis/gather.py --into artifacts/both node0:/scratch/run node1:/scratch/run

Runs from any directory, installed or not. What it does is in `aorta/clusters/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aorta.clusters.command import gather_nodes  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(gather_nodes(sys.argv[1:]))
