#!/usr/bin/env bash
# Train on this machine's NVIDIA devices, one process each unless NPROC says otherwise.
#
#   NPROC=4 bash scripts/launch_cuda.sh [CONFIG] [OVERRIDE...]     OVERRIDEs are train.py's, as `training.max_steps=50`
#
# Sets no NCCL_*, CUDA_* or allocator variable: they are part of what is measured. Set yours before; the run's manifest
# records what was in force (docs/dev/measuring.md, W18).
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"

# What torchrun would set, without its warning: the host only feeds the devices.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

torchrun=$(find_torchrun)
count=$(processes cuda_devices CUDA)
compose "$torchrun" "$count" label=cuda training.device=cuda -- "$@"
exec "${command[@]}"
