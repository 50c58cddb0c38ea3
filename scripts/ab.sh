#!/usr/bin/env bash
# Repeats and A/B plans: launches of train.py in the order A B B A ..., each in a folder of its own, resumable.
#
#   bash scripts/ab.sh --output DIR [--candidate OVERRIDES] [--aa] [--no-report] [OVERRIDE...]     --help explains all of them
#
# The same as `aorta ab` with the project's interpreter; runs in the caller's folder, with its exit code.
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"

python=$root/.venv/bin/python
[[ -x $python ]] || python=$(command -v python3) ||
    fail 127 "no Python found. Run 'bash $root/scripts/setup.sh' first"
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m aorta ab "$@"
