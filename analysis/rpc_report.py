"""Every call of an RPC run, and what it ran where: one table, and one trace with arrows.

    torchrun --standalone --nproc_per_node 2 train.py workload=rpc profiling.enabled=true
    python analysis/rpc_report.py artifacts

Runs from any directory, installed or not. What it does is in `aorta/rpc/rpc_report.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aorta.commands import script  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(script("rpc"))
