"""`python -m aorta`, which is the command `aorta`."""

import sys

from aorta.commands import main

if __name__ == "__main__":
    sys.exit(main())
