"""How well communication hid behind computation, in one run or in one run against another.

    python analysis/overlap_report.py --reference cuda --candidate rocm
    python analysis/overlap_report.py --log-dir DIR --label NAME [--log-dir DIR --label NAME ...] [--output DIR]

Runs from any directory, installed or not. What it does is in `aorta/report/command.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aorta.commands import script  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(script("report"))
