"""Every interval of traces as a table, and their classified lanes as one small trace for Perfetto.

    python analysis/trace_tables.py TRACES [--output DIR] [--format csv|csv.gz|parquet]

Runs from any directory, installed or not. What it does is in `aorta/analysis/load/interval_export.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aorta.commands import script  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(script("traces"))
