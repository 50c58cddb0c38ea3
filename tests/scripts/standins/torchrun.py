"""Stand-in for torchrun (and for python): appends its command line, folder and environment to $RECORD as one JSON line.

Ends with STANDIN_EXIT, 0 when unset; STANDIN_FAIL_ON=WORD makes only a call with that word end so.
"""

import json
import os
import sys
from pathlib import Path

with Path(os.environ["RECORD"]).open("a") as record:
    record.write(json.dumps({"argv": sys.argv[1:], "cwd": str(Path.cwd()), "env": dict(os.environ)}) + "\n")
if os.environ.get("STANDIN_FAIL_ON", sys.argv[-1]) in sys.argv:
    sys.exit(int(os.environ.get("STANDIN_EXIT", "0")))
