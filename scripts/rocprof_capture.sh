#!/usr/bin/env bash
# Record a whole training run on AMD devices with rocprofv3: every kernel, copy, RCCL call and marker, a file a rank.
#
#   bash scripts/rocprof_capture.sh [--dry-run] [CONFIG] [OVERRIDE...]     OVERRIDEs are train.py's, as `training.max_steps=50`
#
# Enters: NPROC (one process a device); ROCPROF_OUTPUT_DIR (rocprof_traces in the repository); ROCPROF_ARGS, rocprofv3's
#   tracing options, which replace the default ones (split on blanks). --dry-run prints the command and runs nothing.
# Leaves: <output>/run_<date>_<time>/rank<r>/<pid>_results.{db,json}; torchrun's exit code, or 1 = the request is wrong,
#   5 = training went well but ranks left no kernel, 127 = rocprofv3 is not installed. No folder stays without a file in it.
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"
source "${here%/*}/lib/capture.sh"

dry_run=no
if [[ ${1-} == --dry-run ]]; then dry_run=yes && shift; fi

refuse_torch_profiler rocprofv3 launch_rocm.sh "$@"

PATH=$PATH:${ROCM_PATH:-/opt/rocm}/bin
help=
if command -v rocprofv3 >/dev/null; then
    help=$(rocprofv3 --help 2>&1) || help=
elif [[ $dry_run == no ]]; then
    fail 127 "rocprofv3 not found on PATH nor in ${ROCM_PATH:-/opt/rocm}/bin. It comes with ROCm (rocprofiler-sdk):" \
        "install ROCm 7, or name its folder in ROCM_PATH. On other devices use scripts/launch_cuda.sh or launch_cpu.sh"
fi

# supports WORD: older builds lack some options, and refuse what they do not know.
supports() { [[ -z $help ]] || grep -qE -- "(^|[^[:alnum:]-])$1([^[:alnum:]-]|\$)" <<<"$help"; }

options=()
if [[ -n ${ROCPROF_ARGS:-} ]]; then
    read -r -d '' -a words <<<"$ROCPROF_ARGS" || true # read ends at the end of the text, and calls that a failure
    dropped=no
    for word in "${words[@]}"; do
        case $word in
            --kernel-symbols) dropped=yes ;;
            --att | --pmc | --pmc=*)
                warn "$word runs kernels one after another: what this run shows of overlap is not real (W17)"
                options+=("$word")
                ;;
            *) options+=("$word") ;;
        esac
    done
    if [[ $dropped == yes ]]; then
        warn "dropped --kernel-symbols: rocprofv3 has no such option, its traces always name their kernels"
    fi
else
    for word in --kernel-trace --memory-copy-trace --rccl-trace --marker-trace; do
        if supports "$word"; then options+=("$word"); else warn "this rocprofv3 has no $word: left out"; fi
    done
fi
given() { [[ " ${options[*]-} " == *" $1"[\ =]* || " ${options[*]-} " == *" $2"[\ =]* ]]; }

# torchrun ends its ranks when one ends; with --process-sync each waits until its peers have written their traces.
if [[ -n $help ]] && supports --process-sync && ! given --process-sync --process-sync; then options+=(--process-sync); fi
if ! given --output-format -f; then
    options+=(--output-format)
    if supports rocpd; then options+=(rocpd); fi # before ROCm 7 there is only JSON
    options+=(json)
fi
run_dir=${ROCPROF_OUTPUT_DIR:-$root/rocprof_traces}/run_$(date +%Y%m%d_%H%M%S)
options+=(-d "$run_dir")
# rocprofv3's own %rank% does not know torchrun: without RANK in the name all ranks write the same file.
named=ours
if given --output-file -o; then named=theirs; else options+=(-o 'rank%env{RANK}%/%pid%'); fi

count=${NPROC:-$(rocm_devices)}
if [[ $count == 0 && -z ${NPROC:-} ]]; then
    count=1
    warn "no ROCm device found: one process"
fi
torchrun=$(torchrun_or_name "$dry_run")
compose "$torchrun" "$count" -- "$@"
command=(rocprofv3 "${options[@]}" -- "${command[@]}")
if [[ $dry_run == yes ]]; then
    print_command "${command[@]}"
    exit
fi

mkdir -p -- "${run_dir%/*}"
mkdir -- "$run_dir" # never mixes with another capture
status=0
"${command[@]}" || status=$?
find "$run_dir" -depth -type d -empty -delete
if [[ ! -e $run_dir ]]; then
    fail "$((status ? status : 5))" "nothing was captured: rocprofv3 wrote no file, and ended with $status"
fi

# holds_kernels FILE: whether at least one kernel is in it; a format that is not read here counts where it is not empty.
holds_kernels() {
    case $1 in
        *.json) grep -q '"dispatch_info"' "$1" ;; # one in each record of a kernel
        *.csv) head -n 1 "$1" | grep -q Kernel_Name && [[ $(head -n 2 "$1" | wc -l) == 2 ]] ;;
        *.db | *.pftrace | *.otf2) [[ -s $1 ]] ;;
        *) false ;;
    esac
}

# files_with_kernels FOLDER: how many.
files_with_kernels() {
    local file count=0
    while IFS= read -r -d '' file; do
        if holds_kernels "$file"; then count=$((count + 1)); fi
    done < <(find "$1" -type f -size +0 -print0)
    printf '%s\n' "$count"
}

# rocprofv3 becomes torchrun, so nobody else can tell whether the traces were written.
shopt -s nullglob
if [[ $named == theirs ]]; then
    # Which file belongs to which rank only the caller's -o knows.
    files=$(files_with_kernels "$run_dir")
    printf '%s: %d files with kernels in %s\n' "${0##*/}" "$files" "$run_dir" >&2
    if ((!status && !files)); then
        fail 5 "training went well, but no file holds a kernel. Does ROCPROF_ARGS switch --kernel-trace on?"
    fi
    exit "$status"
fi
# A launcher that was traced too leaves `rank/<pid>...`: it has no RANK, and is not counted.
ranks=0
for folder in "$run_dir"/rank[0-9]*/; do
    if (($(files_with_kernels "$folder"))); then ranks=$((ranks + 1)); fi
done
printf '%s: kernels of %d of %d ranks in %s\n' "${0##*/}" "$ranks" "$count" "$run_dir" >&2
if ((!status && ranks < count)); then
    fail 5 "training went well, but $((count - ranks)) of $count ranks left no kernel. Did they end by themselves, and" \
        "does ROCPROF_ARGS switch --kernel-trace on?"
fi
exit "$status"
