#!/usr/bin/env bash
# One table about this machine's devices: is the telemetry right, cheap, free of waits and of races here?
#
#   [NPROC=2] bash scripts/gpu_check.sh [--json FILE] [--strategies ddp,fsdp] [--pairs 10] [OVERRIDE...]
#
# OVERRIDEs are train.py's and go to every run, as `training.batch_size=24`. One process a device unless NPROC says
# otherwise. Two devices or more make it meaningful: on one, NCCL only copies. Needs what scripts/setup.sh installs.
# Leaves: the table on stdout, and the same as JSON (artifacts/gpu_check.json). Exit 0 = nothing failed and times were
# judged, 1 = a check failed or there is no device, 4 = nothing failed but no time could be judged, 5 = a rank ended
# before the table was made. docs/gpu.md reads the table.
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"

python=$root/.venv/bin/python
[[ -x $python ]] || python=$(command -v python3) ||
    fail 127 "python3 not found: neither in $root/.venv nor on PATH. Run 'bash $root/scripts/setup.sh' first"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m aorta check-gpu "$@"
