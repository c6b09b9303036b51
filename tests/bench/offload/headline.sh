#!/bin/bash
# A GPT of 2.8 billion parameters (t5-3b's size) on this machine: bf16 weights once in memory, fp32 masters and Adam's
# states on disk, two ranks. PLAIN=1: then the same model without Zeroth, which has no room for it.
#   tests/bench/offload/headline.sh [FOLDER_ON_DISK]     SIZE=350M: the small one; STEPS=6
set -euo pipefail
cd "$(dirname "$0")/../../.."
swap=${1:-build/runs/swap} steps=${STEPS:-6} size=${SIZE:-2.8B}
case $size in
  2.8B) width=2560 layers=36 heads=20 disk=40 memory=19 ;;
  350M) width=1024 layers=28 heads=16 disk=6 memory=4 ;;
  *) echo "headline: error: SIZE is $size; remedy: 2.8B or 350M" >&2; exit 2 ;;
esac
model="model.width=$width model.layers=$layers model.heads=$heads"
mkdir -p "$swap"
free=$(($(df --output=avail -B1 "$swap" | tail -1) >> 30))
there=$(($(awk '/MemAvailable/ {print $2}' /proc/meminfo) >> 20))
if ((free < disk)); then
  echo "headline: error: $swap has $free GiB free, $disk are needed; remedy: name a folder on a larger disk" >&2; exit 3
fi
if ((there < memory)); then
  echo "headline: error: $there GiB of memory are free, $memory are needed; remedy: end other programs" >&2; exit 3
fi
common="train.dtype=bf16 train.micro_batch=1 model.recompute=true model.context=64 train.steps=$steps eval.every=0
  sample.length=0 schedule.use=constant optimizer.lr=${LR:-1e-6} job.name=headline job.runs=build/runs"
echo "headline: $size, $free GiB of disk and $there GiB of memory free"
# The most that the ranks hold, as the kernel counts it: shared memory once.
(
  most=0
  while sleep 0.5; do
    now=0
    for pid in $(pgrep -x gpt || true); do
      pss=$(awk '/^Pss:/ {print $2}' "/proc/$pid/smaps_rollup" 2> /dev/null || true)
      now=$((now + ${pss:-0}))
    done
    if ((now > most)); then most=$now; echo $((most >> 10)) > build/runs/headline.peak; fi
  done
) &
watch=$!
trap 'kill $watch 2> /dev/null || true' EXIT
# shellcheck disable=SC2086
build/bin/zeroth train examples/gpt/gpt.toml strategy=zero2 $model $common \
  offload.optimizer=nvme "offload.nvme.path=$swap"
echo "headline: the ranks held at most $(cat build/runs/headline.peak) MiB together"
tail -n "$steps" build/runs/headline/metrics.jsonl
if [[ -n ${PLAIN:-} ]]; then
  echo "headline: the same without Zeroth, within the $there GiB that are free"
  prlimit --as=$((there << 30)) build/bin/gpt_plain --width $width --layers $layers --heads $heads --context 64 \
    --micro-batch 1 --steps 1 --eval-every 0 --sample 0 && exit 1
  echo "headline: it ended with code $?"
fi
