#!/usr/bin/env python3
"""Finds the largest job that trains within a memory budget.

capacity.py batch [FOLDER_ON_DISK]    largest micro-batch of one model under one memory.device_budget
capacity.py model [FOLDER_ON_DISK]    largest model under device_budget = 1 GiB, host_budget = 4 GiB, three steps each
batch: every row is a run that succeeded; the next larger micro-batch exceeded the budget.
model: starts with the largest model that `zeroth plan` accepts, and removes 1 block (2 from 20 blocks on) until a run
succeeds. Data on disk uses at most 95 % of the free disk space; a row says so if this was the limit.
Two ranks, bf16, AdamW. Exits with 1 if a row misses its target (MARKS).
"""
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.."))
SWAP = os.path.abspath(sys.argv[2] if len(sys.argv) > 2 else "build/runs/swap")
ON_DISK = f"offload.nvme.path={SWAP}"
COMMON = ["train.dtype=bf16", "eval.every=0", "sample.length=0", "schedule.use=constant", "optimizer.lr=1e-5",
          "job.name=capacity", "job.runs=build/runs", "communicator.share_weights=false"]
# Required multiples of what zero0 trains.
MARKS = {"batch": {"zero2": 2.5, "zero2 + cpu": 3.1}, "model": {"zero3 + nvme": 8.0}}
missed = []


def check(mode, name, times):
    mark = MARKS[mode].get(name)
    if mark and times < mark:
        missed.append(f"{name} is {times:.2f} x zero0; its target is {mark} x")


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = re.search(r"model name\s*: (.*)", file.read())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model.group(1) if model else platform.machine()}, {os.cpu_count()} cores, {memory:.1f} GiB of memory"


def run(command, overrides):
    return subprocess.run(["build/bin/zeroth", command, "examples/gpt/gpt.toml", *COMMON, *overrides],
                          capture_output=True, text=True, check=False, env={**os.environ, "ZR_PROGRESS": "plain"})


def trains(overrides):
    done = run("train", overrides)
    if done.returncode not in (0, 2):  # 2: over its budget
        sys.exit(f"capacity: error: {' '.join(overrides)}: exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.returncode == 0


def largest(fits, first=1):
    """The largest n >= first with fits(n), or 0 if no n fits: doubles n, then bisects."""
    if not fits(first):
        return 0
    low = first
    while fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def summary():
    with open("build/runs/capacity/summary.json", encoding="utf-8") as file:
        return json.load(file)


def batch():
    # 38 M parameters; the budget is slightly more than zero0's 18 bytes per parameter: states dominate.
    model = ["model.width=512", "model.layers=12", "model.heads=8", "model.context=32", "train.steps=2"]
    budget = "memory.device_budget=858000000B"
    beside = ["offload.gradients=cpu", "offload.parameters=cpu"]
    rows = [("zero0", ["strategy=zero0"]),
            ("zero2", ["strategy=zero2"]),
            ("zero2 + cpu", ["strategy=zero2", "offload.optimizer=cpu"]),
            ("zero3 + cpu", ["strategy=zero3", "offload.optimizer=cpu", *beside]),
            ("zero3 + nvme", ["strategy=zero3", "offload.optimizer=nvme", *beside, ON_DISK])]
    print(f"largest micro-batch per rank: {' '.join(model)} {budget}")
    first = None
    for name, overrides in rows:
        found = largest(lambda n: trains([*overrides, *model, budget, f"train.micro_batch={n}"]))
        first = found if first is None else first
        times = found / first if first else 0
        print(f"  {name:14} {found:4}   {times:.2f} x zero0", flush=True)
        check("batch", name, times)


def model():
    # Blocks of width 1024, 12.6 M parameters each.
    fixed = ["model.width=1024", "model.heads=16", "model.context=16", "model.recompute=true", "train.micro_batch=1",
             "train.steps=3", "memory.device_budget=1GiB", "memory.host_budget=4GiB"]
    host = ["offload.gradients=cpu"]
    rows = [("zero0", ["strategy=zero0"]),
            ("zero1", ["strategy=zero1"]),
            ("zero2", ["strategy=zero2"]),
            ("zero3", ["strategy=zero3"]),
            ("zero2 + cpu", ["strategy=zero2", "offload.optimizer=cpu", *host]),
            ("zero2 + nvme", ["strategy=zero2", "offload.optimizer=nvme", *host, ON_DISK]),
            ("zero3 + cpu", ["strategy=zero3", "offload.optimizer=cpu", *host]),
            ("zero3 + nvme", ["strategy=zero3", "offload.optimizer=nvme", *host, "offload.parameters=cpu", ON_DISK]),
            ("zero3 + all nvme", ["strategy=zero3", "offload.optimizer=nvme", "offload.gradients=nvme",
                                  "offload.parameters=nvme", ON_DISK])]
    print(f"largest model: {' '.join(fixed)}")
    first = None
    for name, overrides in rows:
        bounded = set()  # numbers of blocks for which only the disk is too small

        def planned(n, chosen=overrides, bounded=bounded):
            plan = run("plan", [*chosen, *fixed, f"model.layers={n}"])
            stored = re.search(r"total +on nvme +([0-9.]+) GiB", plan.stdout)
            on_disk = 2 * float(stored.group(1)) * 2**30 if stored else 0
            fits_on_disk = on_disk < 0.95 * shutil.disk_usage(SWAP).free
            if plan.returncode == 0 and not fits_on_disk:
                bounded.add(n)
            return plan.returncode == 0 and fits_on_disk
        blocks = largest(planned)
        by_disk = ", limited by the disk" if blocks + 1 in bounded else ""
        start = time.time()
        while blocks > 0 and not trains([*overrides, *fixed, f"model.layers={blocks}"]):
            blocks -= 1 if blocks < 20 else 2
            by_disk = ""
        if blocks <= 0:
            first = first or 0
            print(f"  {name:16} {0:4} blocks", flush=True)
            check("model", name, 0)
            continue
        seconds = time.time() - start
        parameters = blocks * (12 * 1024 * 1024 + 13 * 1024) + (256 + 16 + 256) * 1024
        first = parameters if first is None else first
        times = parameters / first if first else 0
        done = summary()
        peaks = {tier: sum(kind["peak"] for kind in kinds.values()) >> 20 for tier, kinds in done["memory"].items()}
        print(f"  {name:16} {blocks:4} blocks {parameters / 1e6:8.0f} M parameters {times:6.1f} x zero0   "
              f"loss {done['loss']:.3f}  MiB per rank {peaks}  {seconds:.0f} s{by_disk}", flush=True)
        check("model", name, times)


modes = {"batch": batch, "model": model}
if len(sys.argv) < 2 or sys.argv[1] not in modes:
    sys.exit(__doc__)
os.makedirs(SWAP, exist_ok=True)
print(time.strftime("%Y-%m-%d"), machine(), shlex.join(sys.argv), sep="\n", flush=True)
modes[sys.argv[1]]()
if missed:
    sys.exit("\n".join(f"capacity: error: {line}" for line in missed))
