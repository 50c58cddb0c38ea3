"""`python -m aorta.gpu_check`."""

import sys

from aorta.gpu_check.check_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
