#!/usr/bin/env bash
# The whole story on a bare machine, in minutes and without a GPU: two short runs, with overlap and without, compared.
#
#   bash scripts/demo.sh [WORD...]     WORDs go to both runs, as `training.max_steps=10`
#
# Leaves: artifacts/reference, artifacts/candidate, and the report in reports/demo; exit code of the step that failed.
# Runs in the repository, wherever it is called from.
set -euo pipefail
script=$(readlink -f -- "${BASH_SOURCE[0]}")
cd -- "${script%/scripts/*}"

python=$(bash scripts/setup.sh)
export PATH="${python%/*}:$PATH"
# One compute thread a rank: gloo's own threads need a core to run beside it, or nothing can overlap.
export OMP_NUM_THREADS=1

# On two cores the real communication competes with compute for them. Both runs therefore use an emulated network whose
# transfers take long beside gloo's own, so that hiding them pays; the report names it beside its results.
run() {
    printf '== %s run: parallel.overlap=%s\n' "$1" "$2"
    torchrun --standalone --nproc_per_node 2 train.py "label=$1" training.device=cpu parallel=ddp \
        "parallel.overlap=$2" fabric=emulated fabric.inter_bandwidth_gb_per_s=0.1 training.max_steps=40 "${@:3}"
}

run reference true "$@"
run candidate false "$@"

printf '== report\n'
python analysis/overlap_report.py --reference reference --candidate candidate --output reports/demo
