#!/usr/bin/env bash
# Train on this machine's AMD devices, one process each unless NPROC says otherwise, with rocm-smi sampled beside.
#
#   NPROC=4 bash scripts/launch_rocm.sh [CONFIG] [OVERRIDE...]     OVERRIDEs are train.py's, as `training.max_steps=50`
#
# Sets no NCCL_*, RCCL_*, HSA_* or GPU_MAX_HW_QUEUES: they are part of what is measured. Set yours before; the run's
# manifest records what was in force (docs/dev/measuring.md, W18). To torch an AMD device is called `cuda`.
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"

# What torchrun would set, without its warning: the host only feeds the devices.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

torchrun=$(find_torchrun)
count=$(processes rocm_devices ROCm)
compose "$torchrun" "$count" label=rocm training.device=cuda --enable-rocm-metrics -- "$@"
exec "${command[@]}"
