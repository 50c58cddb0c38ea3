#!/usr/bin/env bash
# Record a whole training run on NVIDIA devices with Nsight Systems: kernels, copies, NVTX ranges, all ranks in one report.
#
#   bash scripts/nsys_capture.sh [--dry-run] [CONFIG] [OVERRIDE...]     OVERRIDEs are train.py's, as `training.max_steps=50`
#
# Enters: NPROC (one process a device); NSYS_OUTPUT_DIR (nsys_traces in the repository); NSYS_ARGS, options of
#   `nsys profile`, which replace the default ones (split on blanks). --dry-run prints the commands and runs nothing.
# Leaves: <output>/run_<date>_<time>/report.{nsys-rep,sqlite}; torchrun's exit code, or 1 = the request is wrong,
#   5 = training went well but left no report, or it could not be exported, 127 = nsys is missing (nothing is made then).
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"
source "${here%/*}/lib/capture.sh"

dry_run=no
if [[ ${1-} == --dry-run ]]; then dry_run=yes && shift; fi
refuse_torch_profiler nsys launch_cuda.sh "$@"

PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
help=
if command -v nsys >/dev/null; then
    help=$(nsys profile --help 2>&1) || help=
elif [[ $dry_run == no ]]; then
    fail 127 "nsys not found on PATH nor in ${CUDA_HOME:-/usr/local/cuda}/bin. It is NVIDIA's Nsight Systems, part of the" \
        "CUDA toolkit: install it, or name the toolkit's folder in CUDA_HOME. On other devices use" \
        "scripts/rocprof_capture.sh or launch_cpu.sh"
fi

if [[ -n ${NSYS_ARGS:-} ]]; then
    read -r -d '' -a options <<<"$NSYS_ARGS" || true # read ends at the end of the text, and calls that a failure
    for word in "${options[@]}"; do
        case $word in
            -o | -o?* | --output | --output=*)
                fail 1 "NSYS_ARGS has '$word': the report's name is needed to export it. Choose the folder with" \
                    "NSYS_OUTPUT_DIR=DIR"
                ;;
            --gpu-metrics-device*)
                warn "$word samples hardware counters, which may need rights of their own and slows the run down"
                ;;
        esac
    done
else
    # Neither stacks nor context switches: they interrupt the very threads whose run-ahead is measured.
    options=()
    for word in --trace=cuda,nvtx --sample=none --cpuctxsw=none; do
        if [[ -z $help || $help == *"${word%%=*}"* ]]; then options+=("$word"); else
            warn "this nsys has no ${word%%=*}: left out"
        fi
    done
fi
run_dir=${NSYS_OUTPUT_DIR:-$root/nsys_traces}/run_$(date +%Y%m%d_%H%M%S)
report=$run_dir/report

count=${NPROC:-$(cuda_devices)}
if [[ $count == 0 && -z ${NPROC:-} ]]; then
    count=1
    warn "no NVIDIA device found: one process"
fi
torchrun=$(torchrun_or_name "$dry_run")
compose "$torchrun" "$count" -- "$@"
command=(nsys profile "${options[@]}" --output="$report" "${command[@]}")
export_command=(nsys export --type=sqlite --output="$report.sqlite" "$report.nsys-rep")
if [[ $dry_run == yes ]]; then
    print_command "${command[@]}"
    print_command "${export_command[@]}"
    exit
fi

mkdir -p -- "${run_dir%/*}"
mkdir -- "$run_dir" # never mixes with another capture
status=0
"${command[@]}" || status=$?

if [[ ! -s $report.nsys-rep ]]; then
    printf '%s: no report in %s\n' "${0##*/}" "$run_dir" >&2
    if ((!status)); then fail 5 "training went well, but nsys left no report: read what it said above"; fi
    exit "$status"
fi
exported=yes
"${export_command[@]}" >&2 || exported=no
if [[ $exported == no || ! -s $report.sqlite ]]; then
    warn "the report could not be exported. Try again by hand: $(print_command "${export_command[@]}")"
    if ((!status)); then status=5; fi
    exit "$status"
fi
printf '%s: %s.nsys-rep and .sqlite\n' "${0##*/}" "$report" >&2
exit "$status"
