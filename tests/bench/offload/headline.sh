#!/bin/bash
# Trains a GPT of 2.8 billion parameters (t5-3b's size) on this machine: one copy of the bf16 weights in memory, fp32
# masters and Adam's states on disk, two ranks. Succeeds if the loss fell and the ranks used no more memory than planned
# plus the unplanned memory that a job of four blocks uses. PLAIN=1: also runs the same model without Zeroth, which must
# run out of memory.
#   tests/bench/offload/headline.sh [FOLDER_ON_DISK]     SIZE=350M: the small one; STEPS=6; LR=1e-6; CONTEXT=64;
#                                                        OVERLAP=false; SIZE=1.8B
# States are updated during backward, which needs train.nonfinite = "stop" and no clipping; OVERLAP=false: after it.
set -euo pipefail
cd "$(dirname "$0")/../../.."
swap=${1:-build/runs/swap} steps=${STEPS:-6} size=${SIZE:-2.8B}
case $size in
  2.8B) width=2560 layers=36 heads=20 disk=40 memory=19 ;;
  1.8B) width=2048 layers=35 heads=16 disk=22 memory=13 ;;
  350M) width=1024 layers=28 heads=16 disk=6 memory=4 ;;
  *) echo "headline: error: SIZE is $size; remedy: 2.8B, 1.8B or 350M" >&2; exit 2 ;;
esac
rule=(train.nonfinite=stop train.gradient_clipping=0)
mkdir -p "$swap"
free=$(($(df --output=avail -B1 "$swap" | tail -1) >> 30))
there=$(($(awk '/MemAvailable/ {print $2}' /proc/meminfo) >> 20))
if ((free < disk)); then
  echo "headline: error: $swap has $free GiB free, $disk needed; remedy: name a folder on a larger disk" >&2; exit 3
fi
if ((there < memory)); then
  echo "headline: error: $there GiB of memory are free, $memory needed; remedy: end other programs" >&2; exit 3
fi

# Processes of this name that descend from this script.
ours() {
  ps -eo pid=,ppid=,comm= | awk -v top=$$ -v name="$1" '{ parent[$1] = $2; called[$1] = $3 }
    END { for (pid in called) if (called[pid] == name) {
            for (at = pid; at + 0 > 1 && at != top; at = parent[at]);
            if (at == top) print pid } }'
}
# The peak memory of these processes together in MiB, as the kernel counts it (shared memory once).
watch() {
  local most=0 now pid pss
  while sleep 0.3; do
    now=0
    for pid in $(ours "$1"); do
      pss=$(awk '/^Pss:/ {print $2}' "/proc/$pid/smaps_rollup" 2> /dev/null || true)
      now=$((now + ${pss:-0}))
    done
    if ((now > most)); then most=$now; echo $((most >> 10)) > build/runs/headline.peak; fi
  done
}
train() { # name, keys
  local name=$1; shift
  echo 0 > build/runs/headline.peak
  watch gpt &
  local watcher=$!
  local code=0
  build/bin/zeroth train examples/gpt/gpt.toml strategy=zero2 train.dtype=bf16 train.micro_batch=1 \
    model.recompute=true model.context="${CONTEXT:-64}" \
    train.steps="$steps" eval.every=0 sample.length=0 schedule.use=constant \
    optimizer.lr="${LR:-1e-6}" job.name="$name" job.runs=build/runs offload.optimizer=nvme \
    "offload.nvme.path=$swap" "${rule[@]}" "offload.overlap=${OVERLAP:-true}" "$@" || code=$?
  kill $watcher 2> /dev/null; wait $watcher 2> /dev/null || true
  return $code
}
of_run() { python3 -c "import json, sys; $2" < "build/runs/$1"; }
planned() { # the planned bytes of both ranks' ledgers and libtorch's measured activations, MiB
  of_run "$1/summary.json" '
tiers = json.load(sys.stdin)["memory"]
each = sum(kind["peak"] if kind["planned"] is None else kind["planned"]
           for tier in ("device", "host") for kind in tiers.get(tier, {}).values())
print(2 * each >> 20)'
}

echo "headline: $size, $free GiB of disk and $there GiB of memory free"
mkdir -p build/runs
train headline_flat model.width=$width model.layers=4 model.heads=$heads > /dev/null
flat=$(($(cat build/runs/headline.peak) - $(planned headline_flat)))
echo "headline: two processes of four blocks use $flat MiB more than planned"
start=$SECONDS
train headline model.width=$width model.layers=$layers model.heads=$heads
echo "headline: $((SECONDS - start)) s total"
held=$(cat build/runs/headline.peak)
plan=$(planned headline)
echo "headline: peak memory of all ranks $held MiB; $plan MiB planned with measured activations, $flat MiB unplanned"
cat build/runs/headline/metrics.jsonl
fell=$(of_run headline/metrics.jsonl '
losses = [json.loads(line)["loss"] for line in sys.stdin]
losses = [float("inf") if loss is None else loss for loss in losses]  # null: infinite or NaN
last = sum(losses[-2:]) / 2
print(int(last < losses[0]), f"{losses[0]:.3f}, the last two on average {last:.3f}")')
echo "headline: loss of the first step ${fell#* }"
# 2 %: heap fragmentation, which grows with the model.
if ((held > plan * 102 / 100 + flat)); then
  echo "headline: error: the ranks used more memory than planned" >&2; exit 1
fi
if [[ ${fell%% *} != 1 ]]; then
  echo "headline: error: the loss did not fall" >&2; exit 1
fi

if [[ -n ${PLAIN:-} ]]; then
  echo "headline: the same without Zeroth: one process with an address space of $there GiB, the memory that was free"
  code=0
  prlimit --as=$((there << 30)) build/bin/gpt_plain --width $width --layers $layers --heads $heads --context 64 \
    --micro-batch 1 --steps 1 --eval-every 0 --sample 0 > build/runs/headline.plain 2>&1 || code=$?
  head -1 build/runs/headline.plain
  echo "headline: it exited with code $code"
  if ((code == 0)); then
    echo "headline: error: it fit in memory" >&2; exit 1
  fi
  if ((code != 137)) && ! grep -q alloc build/runs/headline.plain; then
    echo "headline: error: it failed, but not because of memory" >&2; exit 1
  fi
fi
echo "headline: passed"
