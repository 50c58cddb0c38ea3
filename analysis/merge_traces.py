"""Chrome traces of several ranks -> one file for Perfetto, on the clock of rank 0.

    python analysis/merge_traces.py artifacts -o merged.json.gz
    python analysis/merge_traces.py NODE0 NODE1 -o merged.json.gz --check

Runs from any directory, installed or not. What it does is in `aorta/merge/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aorta.commands import script  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(script("merge"))
