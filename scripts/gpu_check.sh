#!/usr/bin/env bash
# One table about this machine's devices: is the telemetry right, cheap, free of waits and of races here?
#
#   [NPROC=2] bash scripts/gpu_check.sh [WORD...]     WORDs are train.py's and go to every run, as `training.batch_size=4`
#
# One process a device unless NPROC says otherwise. Two devices or more make it meaningful: on one, NCCL only copies.
# Leaves: the table on stdout; exit 0 = every check passed, 1 = one failed or there is no device.
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"
cd -- "$root"

torchrun=$(find_torchrun)
if ((!$(torch_devices))); then
    fail 1 "torch sees no CUDA or HIP device on this machine, so nothing was checked. Run it where there is one"
fi
count=$(processes torch_devices GPU)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$torchrun" --standalone --nproc_per_node "$count" --module tests.gpu.check "$@"
