#!/usr/bin/env bash
# Make the project's own Python environment, .venv, unless it is there and up to date.
#
# Enters: [--dev], which adds the tools of the gate; PYTHON=<interpreter>, otherwise the first of python3.13, python3.12,
#   python3.11, python3 that will do, one with torch >= 2.11 before one without. It is asked for only when the
#   environment is made: remove .venv to change it.
# Leaves: the path of the environment's interpreter as the last line on stdout; all other words go to stderr.
#   Exit 1: no Python, or pip failed. A torch that is already there (ROCm, CUDA) is used, never replaced.
set -euo pipefail
script=$(readlink -f -- "${BASH_SOURCE[0]}")
root=${script%/scripts/*}
venv=$root/.venv
python=$venv/bin/python

say() { printf 'setup.sh: %s\n' "$*" >&2; }
fail() { say "$@" && exit 1; }

# A stamp holds all that an environment is made from. Its first line is the place: an environment cannot be moved.
inputs() {
    local source
    printf '%s\n' "$root"
    for source in "$root/pyproject.toml" "$root/constraints.txt" "$script" "$root"/aorta/instrument/native/*.?pp; do
        if [[ -e $source ]]; then cat -- "$source"; fi
    done
}
ready() { [[ -x $python ]] && inputs | cmp -s - "$venv/$1.stamp"; }

moved() {
    local stamp place
    for stamp in "$venv"/*.stamp; do
        if [[ -e $stamp ]] && read -r place <"$stamp" && [[ $place != "$root" ]]; then return 0; fi
    done
    return 1
}

# has torch|any INTERPRETER: new enough, and with torch >= 2.11 where asked for (pip does not count 2.11.0a0 as 2.11).
has() {
    "$2" - "$1" >/dev/null 2>&1 <<'END'
import re, sys
if sys.version_info < (3, 11):
    sys.exit(1)
if sys.argv[1] == "torch":
    import torch
    major, minor, rest = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(.*)", torch.__version__).groups()
    sys.exit((int(major), int(minor), not re.match(r"a|b|rc|\.dev", rest)) < (2, 11, True))
END
}

find_python() {
    local wish name names=(python3.13 python3.12 python3.11 python3)
    if [[ -n ${PYTHON:-} ]]; then names=("$PYTHON"); fi
    for wish in torch any; do
        for name in "${names[@]}"; do
            base=$(command -v -- "$name") || continue
            [[ $base == "$venv"/* ]] && continue # it is activated; it cannot be made from itself
            if has "$wish" "$base"; then brings=$wish && return; fi
        done
    done
    fail "found no Python >= 3.11 (tried ${names[*]}). Install one, or name it:" \
        "PYTHON=/path/to/python3.12 bash scripts/setup.sh"
}

make_venv() {
    local options=()
    # What is behind a link is most likely another checkout's, and making it anew begins with emptying it.
    if [[ -L $venv && -n $(find "$venv/" -mindepth 1 -maxdepth 1 -print -quit) ]]; then
        fail "$venv is a link to $(readlink -- "$venv"), an environment that was not made for this checkout, or not" \
            "finished. Remove the link, and $root gets an environment of its own"
    fi
    find_python
    say "making $venv from $base"
    mkdir -p -- "$venv"
    : >"$unfinished"
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name unfinished -exec rm -rf {} +
    if [[ $brings == torch ]]; then options=(--system-site-packages); fi
    "$base" -m venv ${options[@]+"${options[@]}"} "$venv" >&2 ||
        fail "$base could not make an environment (see its output above). Debian and Ubuntu need the package python3-venv"
    # An interpreter that lives in an environment of its own (the ROCm images) does not share its packages that way.
    if [[ $brings == torch ]] && ! has torch "$python"; then
        "$base" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
            >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
        has torch "$python" || fail "$base has torch, but an environment made from it cannot load it"
    fi
}

install() {
    "$python" -m pip --disable-pip-version-check install --quiet "$@" >&2 ||
        fail "pip could not install $* (see pip's output above). Check the network and pip's index, then run this again"
}

extras=run
case ${1-} in
    --dev) extras=dev ;;
    '') ;;
    *) fail "unknown argument '$1'; allowed: --dev" ;;
esac

if ! ready dev && ! { [[ $extras == run ]] && ready run; }; then
    unfinished=$venv/unfinished # still there at the next start: this one was interrupted
    if ! has any "$python" || [[ -e $unfinished ]] || moved; then make_venv; fi
    : >"$unfinished"
    rm -f -- "$venv"/*.stamp

    say "installing (some minutes the first time)"
    has torch "$python" || install torch==2.13.0
    # Whatever torch is there now is the one that stays.
    "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$venv/torch.txt"
    target='.'
    if [[ $extras == dev ]]; then target='.[dev,dask]'; fi
    cd -- "$root"
    install -c constraints.txt -c "$venv/torch.txt" -e "$target"

    # Where torch is shared, its launcher is not in this environment, and the other one would start the wrong Python.
    if [[ ! -e $venv/bin/torchrun ]]; then
        printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$@"\n' "$python" >"$venv/bin/torchrun"
        chmod +x "$venv/bin/torchrun"
    fi
    # What times collectives from C++. Without it they are timed from Python: nothing stops here for the lack of it.
    if command -v "${CXX:-c++}" >/dev/null; then
        say "compiling the instrument (a minute)"
        "$python" -m aorta.instrument.native >/dev/null || say "not compiled: collectives will be timed from Python"
    else
        say "no C++ compiler: collectives will be timed from Python, which costs more"
    fi
    rm -f -- "$unfinished"
    inputs >"$venv/$extras.stamp"
fi
printf '%s\n' "$python"
