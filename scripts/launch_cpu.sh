#!/usr/bin/env bash
# Train on this machine's processor, two gloo ranks unless NPROC says otherwise.
#
#   NPROC=4 bash scripts/launch_cpu.sh [CONFIG] [OVERRIDE...]      OVERRIDEs are train.py's, as `training.max_steps=50`
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"

# One compute thread a rank: gloo's own threads need a core to run beside it, or nothing can overlap.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

torchrun=$(find_torchrun)
compose "$torchrun" "${NPROC:-2}" label=cpu training.device=cpu -- "$@"
exec "${command[@]}"
