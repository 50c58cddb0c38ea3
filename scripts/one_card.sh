#!/usr/bin/env bash
# What one card can show in eight minutes, the most valuable first: nine parts, each with a limit and a file of its own.
# A part that fails leaves the others.
#
#   [LIMIT_S=480] bash scripts/one_card.sh OUT [--only 3,4] [OVERRIDE...]
#
# OVERRIDEs are train.py's, behind experiment=full, for every part that trains. LIMIT_S is the time for all parts; each may
# take its share of it, and what is left. Needs a device, what scripts/setup.sh installs (--offline is enough), pytest,
# pytest-timeout, pytest-xdist and hypothesis. Sets nothing on the card; where NVIDIA's MPS is there, two ranks run under
# a daemon of their own.
# Leaves: OUT/<part>.log with all that a part said, what it measured beside it, and the table on stdout and in
# OUT/summary.txt. Exit 0: every part succeeded; 1: one did not, OUT is missing, or there is no device.
set -euo pipefail
here=$(readlink -f -- "${BASH_SOURCE[0]}")
source "${here%/*}/lib/launch.sh"

python=$root/.venv/bin/python
[[ -x $python ]] || python=$(command -v python3) ||
    fail 127 "python3 not found: neither in $root/.venv nor on PATH. Run 'bash $root/scripts/setup.sh' first"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[[ -n ${1-} && $1 != -* ]] || fail 1 "where to? bash scripts/one_card.sh OUT [--only 3,4] [OVERRIDE...]"

# name|share of LIMIT_S|what it shows
parts=(
    'facts|10|driver, torch, NCCL, compilers, MPS, clocks and power limit'
    'tests|65|build of the interceptor; pytest -m gpu'
    'check_one_rank|100|check-gpu, one rank: times against kernels'
    'check_two_ranks|55|check-gpu, two ranks on the device: real collectives'
    'values|75|losses of two ranks with the instrument off and in mode dedicated'
    'cost|65|step time off / observe / dedicated'
    'host_bound|35|a small batch: marks against kernels'
    'captures|40|a calibration and profiler traces, read back'
    'hang|35|a kernel that does not end, on one of two ranks: autopsy'
)
# A small model: all that two ranks of one card exchange goes over the loopback interface.
small=(workload.num_layers=2 workload.vocab_size=5000)

trained() { # LABEL OVERRIDE...: two ranks that share the card, whose kernels are the library's; the record is OUT/LABEL
    local label=$1
    shift
    "$python" -m torch.distributed.run --standalone --nproc_per_node 2 "$root/train.py" training.device=cuda \
        training.ranks_per_device=2 "training.output_dir=$out" "label=$label" experiment=full parallel=fsdp \
        training.max_steps=20 "${small[@]}" ${words[@]+"${words[@]}"} "$@"
}

with_mps() { # NVIDIA's Multi-Process Service for this part, where it is installed: without it ranks take turns
    command -v nvidia-cuda-mps-control || return 0
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=45
    trap '{ echo quit | nvidia-cuda-mps-control; cat "$CUDA_MPS_LOG_DIRECTORY"/*.log; rm -rf "$CUDA_MPS_LOG_DIRECTORY"; } \
        >>"$out/mps.log" 2>&1 || true' EXIT
    nvidia-cuda-mps-control -d
}

run_part() { # PART
    local code=0 evidence ranks strategy tool waited=0
    case $1 in
        facts)
            for tool in g++ nvcc nvidia-cuda-mps-control nsys; do
                printf '%s: %s\n' "$tool" "$(command -v "$tool" || printf 'not there')"
            done
            grep -i profiling /proc/driver/nvidia/params || true # RmProfilingAdminOnly: 1 keeps CUPTI's counters from users
            nvidia-smi -q -d CLOCK,POWER,COMPUTE || printf 'nvidia-smi: no answer\n'
            "$python" -m benchmarks.one_card facts
            ;;
        tests)
            "$python" -m aorta.instrument.native || printf 'not compiled: nothing is looked at\n'
            # Warnings of other versions than the gate's are no failures here.
            "$python" -m pytest -q -x -W default -p no:cacheprovider -m gpu "$root/tests/gpu"
            ;;
        check_one_rank)
            NPROC=1 "$python" -m aorta check-gpu --json "$out/check_one_rank.json" --pairs 1 ${words[@]+"${words[@]}"}
            ;;
        check_two_ranks)
            with_mps
            "$python" -m aorta check-gpu training.ranks_per_device=2 --json "$out/check_two_ranks.json" --pairs 1 \
                parallel=fsdp "${small[@]}" ${words[@]+"${words[@]}"}
            ;;
        values)
            with_mps
            trained off instrument.mode=off
            trained dedicated instrument.mode=dedicated
            "$python" -m benchmarks.one_card values "$out/off" "$out/dedicated"
            ;;
        cost)
            for strategy in fsdp ddp; do
                printf '%s:\n' "$strategy"
                "$python" -m benchmarks.one_card cost 2 experiment=full "parallel=$strategy" ${words[@]+"${words[@]}"}
            done
            ;;
        host_bound)
            trained host_bound training.batch_size=1 instrument.calibration=4
            "$python" -m benchmarks.one_card record "$out/host_bound"
            ;;
        captures)
            with_mps
            trained captures profiling=aorta profiling.enabled=true instrument.calibration=6
            "$python" -m benchmarks.one_card record "$out/captures"
            "$python" -m aorta report "$out/captures"/torch_profiler/rank0/*.json* --output "$out/captures_report"
            "$python" -m benchmarks.one_card trace "$out/captures" "$out/captures_report/summary.json"
            ;;
        hang)
            mkdir -p "$out/hang"
            evidence=("$out/hang/run")
            "$python" -m torch.distributed.run --standalone --nproc_per_node 2 --module benchmarks.one_card stuck "$out/hang" &
            ranks=$!
            while ((waited < 60)) && ! [[ -e $out/hang/settled_0 && -e $out/hang/settled_1 ]] && kill -0 "$ranks"; do
                sleep 1
                waited=$((waited + 1))
            done
            if [[ -d $out/hang/rings ]]; then evidence+=("$out/hang/rings"); fi # of torch with NCCL
            sleep 6 # both have waited for 5 s; within 10 s it may be a slow step
            "$python" -m aorta autopsy "${evidence[@]}" --live >"$out/hang/autopsy.txt" || code=$?
            kill "$ranks" || true
            wait "$ranks" || true
            cat "$out/hang/autopsy.txt"
            printf 'autopsy ended with %s (3: a cause was found): %s\n' "$code" "$(head -n 1 "$out/hang/autopsy.txt")"
            ((code == 3))
            ;;
    esac
}

out=$(readlink -m -- "$1") only=''
shift
if [[ ${1-} == --only ]]; then
    only=,$2,
    shift 2
fi
words=("$@")
mkdir -p -- "$out"
cd -- "$root"

# `timeout` needs a command: this script again, for one part.
if [[ -n ${ONE_CARD_PART:-} ]]; then
    run_part "$ONE_CARD_PART"
    exit
fi

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1 ||
    fail 1 "$python has no torch that sees a CUDA or HIP device: there is no card to look at"
limit=${LIMIT_S:-480}
begin=$SECONDS failed=0 number=0
printf '%-2s %-16s %-10s %5s  %s\n' '' part result s shows | tee "$out/summary.txt"
for part in "${parts[@]}"; do
    number=$((number + 1))
    IFS='|' read -r name share what <<<"$part"
    [[ -z $only || $only == *,$number,* ]] || continue
    most=$((share * limit / 480)) left=$((limit - (SECONDS - begin)))
    ((most <= left)) || most=$left
    started=$SECONDS code=0 said=''
    if ((most < 1)); then
        result='no time'
    else
        ONE_CARD_PART=$name timeout --kill-after=5 "$most" bash "$here" "$out" ${words[@]+"${words[@]}"} \
            >"$out/$name.log" 2>&1 </dev/null || code=$?
        case $code in
            0) result=ok ;;
            124 | 137) result="> $most s" ;;
            *) result="failed $code" ;;
        esac
        said=$(grep -vE '^[[:space:]]*$|^the same as JSON' "$out/$name.log" | tail -n 1 | cut -c1-200) || true
    fi
    [[ $result == ok ]] || failed=1
    printf '%d  %-16s %-10s %5d  %s\n' "$number" "$name" "$result" "$((SECONDS - started))" "$what" |
        tee -a "$out/summary.txt"
    [[ -z $said ]] || printf '%37s%s\n' '' "$said" | tee -a "$out/summary.txt"
done
exit "$failed"
