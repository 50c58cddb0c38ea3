#!/usr/bin/env bash
# Make the project's own Python environment, .venv, unless it is there and up to date.
#
# Enters: [--dev], which adds the tools of the gate; PYTHON=<interpreter>, otherwise the first of python3.13, python3.12,
#   python3.11, python3 that will do, one with torch >= 2.11 before one without. It is asked for only when the
#   environment is made: remove .venv to change it.
#   --wheels DIR [--python 3.12] [--without FILE] makes no environment, but fills DIR with the wheels that another Linux
#   machine of this architecture needs; torch is never among them, nor what FILE (its `pip freeze`) names.
#   --offline DIR installs from DIR alone, beside the torch and the packages that are there.
# Leaves: the path of the environment's interpreter (or DIR) as the last line on stdout; all other words go to stderr.
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
    local wish name names=(python3.13 python3.12 python3.11 python3) wishes=(torch any)
    if [[ -n $wheels ]]; then names=("python$version" "${names[@]}") wishes=(any); fi
    if [[ -n ${PYTHON:-} ]]; then names=("$PYTHON"); fi
    for wish in "${wishes[@]}"; do
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

pip() { "$python" -m pip --disable-pip-version-check "$@" >&2; }

install() {
    local remedy="Check the network and pip's index, then run this again"
    if [[ -n $offline ]]; then remedy="scripts/setup.sh --wheels fills $offline where there is a network"; fi
    pip install --quiet "$@" || fail "pip could not install $* (see pip's output above). $remedy"
}

# What pyproject.toml asks for, but for torch, and what builds AORTA itself: into $wheels, for Python $version.
fetch() {
    local needed tag machine sources=() platforms=()
    scratch=$(mktemp -d)
    trap 'rm -rf -- "$scratch"' EXIT
    find_python
    "$base" -m venv "$scratch/env" >&2 || fail "$base could not make an environment (see its output above)"
    python=$scratch/env/bin/python
    mapfile -t needed < <("$python" - "$root/pyproject.toml" <<'END'
import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))
for line in project["build-system"]["requires"] + project["project"]["dependencies"]:
    if not re.match(r"torch\b", line):
        print(line)
END
    )
    # Published without wheels; whatever its Python, a wheel of it fits every machine.
    mapfile -t sources < <(grep -E '^antlr4-python3-runtime==' "$root/constraints.txt")
    machine=$(uname -m)
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do platforms+=(--platform "${tag}_$machine"); done
    say "fetching for Python $version on Linux $machine"
    mkdir -p -- "$scratch/wheels" "$wheels"
    ((${#sources[@]} == 0)) || pip wheel --quiet --no-deps -w "$scratch/wheels" "${sources[@]}" ||
        fail "pip could not build ${sources[*]}"
    pip download --quiet -d "$scratch/wheels" --find-links "$scratch/wheels" -c "$root/constraints.txt" \
        --only-binary=:all: --python-version "$version" "${platforms[@]}" "${needed[@]}" ||
        fail "pip could not fetch ${needed[*]} (see pip's output above)"
    "$python" - "$scratch/wheels" "$wheels" "${without:-/dev/null}" "$root/pyproject.toml" <<'END' >&2
import pathlib, re, shutil, sys, tomllib
source, target, without, project = map(pathlib.Path, sys.argv[1:])
canonical = lambda line: re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", line)[0]).lower()
builds = tomllib.loads(project.read_text())["build-system"]["requires"]  # pip installs these anew for each build
there = {*map(canonical, without.read_text().splitlines())} - {*map(canonical, builds)}
taken = [wheel for wheel in sorted(source.iterdir()) if canonical(wheel.name.partition("-")[0]) not in there]
for wheel in taken:
    shutil.copyfile(wheel, target / wheel.name)
size = sum(wheel.stat().st_size for wheel in taken)
print(f"setup.sh: {len(taken)} wheels, {size / 1e6:.1f} MB, without torch. There: scripts/setup.sh --offline {target}")
END
}

extras=run offline='' wheels='' version=3.12 without=''
while (($# > 0)); do
    case $1 in
        --dev) extras=dev && shift && continue ;;
        --offline | --wheels | --python | --without) [[ -n ${2-} ]] || fail "$1 needs a value" ;;
        *) fail "unknown argument '$1'; allowed: --dev, --offline DIR, --wheels DIR [--python 3.12] [--without FILE]" ;;
    esac
    case $1 in
        --offline) offline=$(readlink -m -- "$2") ;;
        --wheels) wheels=$(readlink -m -- "$2") ;;
        --python) version=$2 ;;
        --without) without=$2 ;;
    esac
    shift 2
done
[[ -z $without || -r $without ]] || fail "--without $without: cannot be read. It is what 'pip freeze' printed there"
if [[ -n $wheels ]]; then
    fetch
    printf '%s\n' "$wheels"
    exit
fi
[[ -z $offline || -n $(find "$offline/" -maxdepth 1 -name '*.whl' -print -quit 2>/dev/null) ]] ||
    fail "--offline $offline: no wheels there. 'scripts/setup.sh --wheels DIR' fetches them where there is a network"

if ! ready dev && ! { [[ $extras == run ]] && ready run; }; then
    unfinished=$venv/unfinished # still there at the next start: this one was interrupted
    if ! has any "$python" || [[ -e $unfinished ]] || moved; then make_venv; fi
    : >"$unfinished"
    rm -f -- "$venv"/*.stamp

    say "installing (some minutes the first time)"
    if ! has torch "$python"; then
        [[ -z $offline ]] || fail "$python has no torch >= 2.11, which wheels do not bring. Install it, or name a Python" \
            "that has it: PYTHON=/path/to/python3.12 bash scripts/setup.sh --offline $offline"
        install torch==2.13.0
    fi
    # Whatever torch is there now is the one that stays.
    "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$venv/torch.txt"
    target='.'
    if [[ $extras == dev ]]; then target='.[dev,dask]'; fi
    cd -- "$root"
    if [[ -n $offline ]]; then
        # What is there stays, whatever its version; the wheels are of those that constraints.txt names.
        install --no-index --find-links "$offline" -c "$venv/torch.txt" -e "$target"
    else
        install -c constraints.txt -c "$venv/torch.txt" -e "$target"
    fi
    # Python takes a folder called aorta where it starts, as this checkout seen from its parent, for the package, unless a
    # later entry of its path has the package itself; what pip installs with -e is no entry.
    for packages in "$venv"/lib/python3*/site-packages; do
        if [[ -d $packages ]]; then printf '%s\n' "$root" >"$packages/checkout.pth"; fi
    done

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
