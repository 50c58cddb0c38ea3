# shellcheck shell=bash
# What the capture scripts share beside launch.sh; sourced, never run.
#
# Enters: train.py's overrides. Leaves: functions; nothing is run by sourcing it.

warn() { printf '%s: warning: %s\n' "${0##*/}" "$*" >&2; }

# refuse_torch_profiler TOOL LAUNCHER WORD...: two tracers cannot hold the device at once, the second one hangs or fails.
# What a configuration file or a preset switches on is not seen here; train.py refuses that as it starts.
refuse_torch_profiler() {
    local tool=$1 launcher=$2 word
    shift 2
    for word in "$@"; do
        if [[ ${word,,} =~ (^|[=+])profiling\.enabled=(true|yes|y|on|1)$ ]]; then
            fail 1 "'$word' asks for torch.profiler, which cannot run under $tool. Leave it out, or take its traces in" \
                "a run of their own: bash scripts/$launcher profiling.enabled=true"
        fi
    done
}

# print_command WORD...: one line that a shell reads back as the same words.
print_command() {
    local line
    printf -v line '%q ' "$@"
    printf '%s\n' "${line% }"
}

# torchrun_or_name DRY_RUN: the torchrun to run; a dry run needs none.
torchrun_or_name() {
    local found
    if found=$(find_torchrun 2>/dev/null); then
        printf '%s\n' "$found"
    elif [[ $1 == yes ]]; then
        printf 'torchrun\n'
    else
        find_torchrun
    fi
}
