#!/usr/bin/env python3
"""What fits under a budget, found by training it.

capacity.py batch [FOLDER_ON_DISK]    largest micro-batch of one model under one memory.device_budget
capacity.py model [FOLDER_ON_DISK]    largest model under device_budget = 1 GiB, host_budget = 4 GiB, three steps each
Every row is a run that ended well; the next larger one did not. Two ranks, bf16, AdamW.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import time

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.."))
SWAP = os.path.abspath(sys.argv[2] if len(sys.argv) > 2 else "build/runs/swap")
ON_DISK = f"offload.nvme.path={SWAP}"
COMMON = ["train.dtype=bf16", "eval.every=0", "sample.length=0", "schedule.use=constant", "optimizer.lr=1e-5",
          "job.name=capacity", "job.runs=build/runs", "communicator.alias=false"]


def run(command, overrides):
    return subprocess.run(["build/bin/zeroth", command, "examples/gpt/gpt.toml", *COMMON, *overrides],
                          capture_output=True, text=True, check=False, env={**os.environ, "ZR_PROGRESS": "plain"})


def trains(overrides):
    done = run("train", overrides)
    if done.returncode not in (0, 2):  # 2: over its budget
        sys.exit(f"capacity: error: {' '.join(overrides)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.returncode == 0


def largest(fits, first=1):
    """The largest n >= first with fits(n), 0 if none: doubling, then halving the distance."""
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
    # 38 M parameters; the budget holds zero0's 18 bytes of each and little more: states dominate.
    model = ["model.width=512", "model.layers=12", "model.heads=8", "model.context=32", "train.steps=2"]
    budget = "memory.device_budget=858000000B"
    beside = ["offload.gradients=cpu", "offload.parameters=cpu"]
    rows = [("zero0", ["strategy=zero0"]),
            ("zero2", ["strategy=zero2"]),
            ("zero2 + cpu", ["strategy=zero2", "offload.optimizer=cpu"]),
            ("zero3 + cpu", ["strategy=zero3", "offload.optimizer=cpu", *beside]),
            ("zero3 + nvme", ["strategy=zero3", "offload.optimizer=nvme", *beside, ON_DISK])]
    print(f"largest micro-batch of a rank: {' '.join(model)} {budget}")
    first = None
    for name, overrides in rows:
        found = largest(lambda n: trains([*overrides, *model, budget, f"train.micro_batch={n}"]))
        first = first or found
        print(f"  {name:14} {found:4}   {found / first:.2f} x zero0", flush=True)


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
        def planned(n, chosen=overrides):
            plan = run("plan", [*chosen, *fixed, f"model.layers={n}"])
            stored = re.search(r"in all +on nvme +([0-9.]+) GiB", plan.stdout)
            on_disk = 2 * float(stored.group(1)) * 2**30 if stored else 0
            return plan.returncode == 0 and on_disk < 0.95 * shutil.disk_usage(SWAP).free
        blocks = largest(planned)
        start = time.time()
        while blocks > 0 and not trains([*overrides, *fixed, f"model.layers={blocks}"]):
            blocks -= 1 if blocks < 20 else 2
        seconds = time.time() - start
        parameters = blocks * (12 * 1024 * 1024 + 13 * 1024) + (256 + 16 + 256) * 1024
        first = first or parameters
        done = summary()
        peaks = {tier: sum(kind["peak"] for kind in kinds.values()) >> 20 for tier, kinds in done["memory"].items()}
        print(f"  {name:16} {blocks:4} blocks {parameters / 1e6:8.0f} M parameters {parameters / first:6.1f} x zero0   "
              f"loss {done['loss']:.3f}  MiB of a rank {peaks}  {seconds:.0f} s", flush=True)


os.makedirs(SWAP, exist_ok=True)
{"batch": batch, "model": model}.get(sys.argv[1] if len(sys.argv) > 1 else "", lambda: sys.exit(__doc__))()
