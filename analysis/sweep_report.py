"""A sweep as a table, one row a job, and a metric over two of its keys as a heat map.

    python train.py -m label=sizes training.batch_size=4,8 parallel.bucket_cap_mb=1,2,4
    python analysis/sweep_report.py artifacts/sizes --metric job_step_ms

Runs from any directory, installed or not. What it does is in `aorta/experiments/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aorta.commands import script  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(script("sweep"))
