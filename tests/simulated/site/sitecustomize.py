"""Python runs this when it starts with this folder on its path: the process gets the simulated device.

So `python -m torch.distributed.run ... train.py` and all its ranks have it, unmodified. A device that was asked for and
cannot be had ends the process: training on the CPU in its place would look like success.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[3])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from tests.simulated import load  # noqa: E402 the folder above has to be on the path

try:
    if load.wanted():
        load.load_with_torch()
except RuntimeError as error:
    raise SystemExit(f"simulated device: {error}") from None
