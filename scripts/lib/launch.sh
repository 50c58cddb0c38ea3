# shellcheck shell=bash
# What the launch scripts share; sourced, never run.
#
# Enters: the caller's arguments: [CONFIG] OVERRIDE..., where CONFIG is a first argument without '=' that does not start with
#   '-'; NPROC, the number of processes on this machine. Leaves: the array `command`, a torchrun command line, ready to run.
library=$(readlink -f -- "${BASH_SOURCE[0]}")
root=${library%/scripts/*}

# fail CODE WORD...: 1 = the request is wrong, 127 = a tool is missing.
fail() {
    local code=$1
    shift
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit "$code"
}

# find_torchrun: the project's own, so that the ranks run in the project's environment; else the one on PATH.
find_torchrun() {
    if [[ -x $root/.venv/bin/torchrun ]]; then
        printf '%s\n' "$root/.venv/bin/torchrun"
    else
        command -v torchrun ||
            fail 127 "torchrun not found: neither in $root/.venv nor on PATH. Run 'bash $root/scripts/setup.sh' first"
    fi
}

# find_config PATH: absolute, seen from the caller's folder, then from the repository (train.py runs from anywhere).
find_config() {
    local folder
    for folder in "$PWD" "$root"; do
        [[ $1 == /* ]] && folder=
        if [[ -f $folder${folder:+/}$1 ]]; then printf '%s\n' "$folder${folder:+/}$1" && return; fi
    done
    fail 1 "configuration '$1' not found (looked in $PWD and $root). Words for train.py contain '=' or start with '-'"
}

# compose TORCHRUN PROCESSES DEFAULT... -- [CONFIG] OVERRIDE...: fill `command`. A default `label=` yields to the caller's.
compose() {
    local torchrun=$1 processes=$2 word label='' defaults=()
    shift 2
    case $processes in
        '' | *[!0-9]* | 0*) fail 1 "NPROC is '$processes'; it must be a whole number of processes, 1 or more" ;;
    esac
    while [[ $1 != -- ]]; do defaults+=("$1") && shift; done
    shift
    command=("$torchrun" --standalone --nproc_per_node "$processes" "$root/train.py")
    case ${1-} in
        '' | -* | *=*) ;;
        *)
            word=$(find_config "$1")
            command+=(--config "$word")
            shift
            ;;
    esac
    for word in "$@"; do
        case $word in label=* | *[=+]label=*) label=given ;; esac
    done
    for word in ${defaults[@]+"${defaults[@]}"}; do
        [[ $word == label=* && -n $label ]] || command+=("$word")
    done
    command+=("$@")
}

# listed IDS: how many devices a *_VISIBLE_DEVICES list leaves (the runtimes stop at the first negative id).
listed() {
    local id count=0 ids=()
    IFS=, read -r -a ids <<<"$1"
    for id in ${ids[@]+"${ids[@]}"}; do
        [[ $id == -* ]] && break
        count=$((count + 1))
    done
    printf '%s\n' "$count"
}

# torch_devices: the slow way (torch takes seconds to load), which is always right.
torch_devices() {
    local python=$root/.venv/bin/python
    [[ -x $python ]] || python=python3
    "$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || printf '0\n'
}

cuda_devices() {
    local count
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        listed "$CUDA_VISIBLE_DEVICES"
    elif count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU '); then
        printf '%s\n' "$count"
    else
        torch_devices
    fi
}

# kfd_devices NODES DRI: the kernel's own list; a container sees all nodes but only its own render devices.
kfd_devices() {
    local node minor count=0
    for node in "$1"/*/properties; do
        minor=$(sed -n 's/^drm_render_minor //p' "$node" 2>/dev/null) || continue
        if [[ ${minor:-0} != 0 && -e $2/renderD$minor ]]; then count=$((count + 1)); fi
    done
    printf '%s\n' "$count"
    ((count))
}

rocm_devices() {
    local count
    if [[ -n ${HIP_VISIBLE_DEVICES+set} ]]; then
        listed "$HIP_VISIBLE_DEVICES"
    elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then # HIP heeds it too
        listed "$CUDA_VISIBLE_DEVICES"
    elif [[ -n ${ROCR_VISIBLE_DEVICES+set} ]]; then
        listed "$ROCR_VISIBLE_DEVICES"
    elif count=$(rocm-smi --showid 2>/dev/null | grep -oE '^GPU\[[0-9]+\]' | sort -u | grep -c .) ||
        count=$(amd-smi list 2>/dev/null | grep -cE '^GPU: *[0-9]') ||
        count=$(kfd_devices /sys/class/kfd/kfd/topology/nodes /dev/dri); then
        printf '%s\n' "$count"
    else
        torch_devices
    fi
}

# processes COUNTER PLATFORM: NPROC, or one process a device.
processes() {
    local count
    if [[ -n ${NPROC:-} ]]; then
        printf '%s\n' "$NPROC"
    else
        count=$("$1")
        ((count)) || fail 1 "no $2 device found. Use scripts/launch_cpu.sh, or set NPROC to launch all the same"
        printf '%s\n' "$count"
    fi
}
