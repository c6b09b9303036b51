#!/usr/bin/env python3
"""`make peers`: trains one GPT with every system in turn. Standard library only; torch is in build/peers/venv.

A round runs every system once, in separate processes; ratios compare runs of one round. A warm-up round comes first:
it compiles DeepSpeed's extensions, fills the page cache, and chooses the faster of a system's settings.
"""
import argparse
import glob
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time

import table

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../../.."))
PLACE = os.path.join(ROOT, "build/peers")
WORLD, WARM, TRIAL = 2, 3, 5
SIZES = {"S": {"layers": 6, "width": 384, "heads": 6, "context": 256, "samples": 4, "steps": 20},
         "M": {"layers": 12, "width": 768, "heads": 12, "context": 256, "samples": 2, "steps": 10}}
PEERS = ["plain", "ddp", "torch_zero1", "fsdp2_keep", "fsdp2_reshard",
         "deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3"]
ZEROTH = ["zero0", "zero1", "zero2", "zero3"]
TIMEOUT = 1200


def settings(system, dtype):
    """The settings to try for a system; the faster one is used."""
    if system.startswith("deepspeed"):
        return ["cpu_adam", "torch_fused"]
    if system in ("ddp", "torch_zero1") and dtype == "bf16":
        return ["autocast", "compressed"]
    return [""]


class Failed(Exception):
    pass


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def finish(processes, logs):
    """Waits for all; when one fails, ends the others and raises Failed with the last line of the first that failed."""
    end, failed = time.time() + TIMEOUT, None
    try:
        while failed is None and any(p.poll() is None for p in processes):
            failed = next((i for i, p in enumerate(processes) if p.poll() not in (None, 0)), None)
            if time.time() > end:
                failed = -1
            time.sleep(0.02)
        if failed is None:
            failed = next((i for i, p in enumerate(processes) if p.returncode), None)
    finally:  # leaves no process behind, also when interrupted
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
    if failed is None:
        return
    if failed == -1:
        raise Failed(f"no result after {TIMEOUT} s; see {logs[0]}")
    with open(logs[failed], encoding="utf-8", errors="replace") as log:
        said = [line.strip() for line in log if line.strip()]
    errors = [line for line in said if "Error" in line or "error:" in line] or said or ["no output"]
    raise Failed(f"{errors[-1][:160]} (exit code {processes[failed].returncode}; {logs[failed]})")


def start(command, log, extra):
    with open(log, "w", encoding="utf-8") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                                env={**os.environ, "OMP_NUM_THREADS": "1", **extra})


def run_peer(job, log):
    job = {**job, "world": WORLD}
    shared = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
              "CUDA_VISIBLE_DEVICES": "", "TORCH_EXTENSIONS_DIR": f"{PLACE}/extensions", "PYTHONUNBUFFERED": "1",
              "PATH": f"{PLACE}/venv/bin:" + os.environ["PATH"]}
    for lock in glob.glob(f"{PLACE}/extensions/**/lock", recursive=True):  # left by a killed run; would hang
        os.remove(lock)
    logs = [f"{log}.{rank}.log" for rank in range(WORLD)]
    finish([start([f"{PLACE}/venv/bin/python", f"{HERE}/peer.py", json.dumps(job)], logs[rank],
                  {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(WORLD)], logs)


def run_zeroth(job, log):
    name = os.path.basename(log)
    overrides = {"strategy": job["system"], "job.name": name, "job.runs": f"{PLACE}/runs", "train.steps": job["steps"],
                 "train.micro_batch": job["samples"], "train.dtype": job["dtype"], "peers.inputs": job["inputs"],
                 "peers.result": job["result"], "peers.warm": job["warm"],
                 **{f"model.{key}": job[key] for key in ("layers", "width", "heads", "context")}}
    logs = [f"{log}.log"]
    finish([start([f"{ROOT}/build/bin/zeroth", "launch", "-n", str(WORLD), "--", f"{ROOT}/build/bin/peers_zeroth",
                   f"{HERE}/peers.toml", *(f"{key}={value}" for key, value in overrides.items())], logs[0], {})], logs)
    with open(f"{PLACE}/runs/{name}/metrics.jsonl", encoding="utf-8") as rows:
        wire = [json.loads(row)["communication_bytes"] for row in rows][job["warm"]:]
    return sum(wire) / len(wire)


def run(system, setting, size, dtype, steps):
    """Runs one system once and returns its results."""
    shape = {key: value for key, value in SIZES[size].items() if key != "steps"}
    log = f"{PLACE}/logs/{size}_{dtype}_{system}" + (f"_{setting}" if setting else "")
    inputs = f"{PLACE}/inputs/{size}"
    job = {**shape, "system": system, "setting": setting, "dtype": dtype, "steps": steps, "warm": min(WARM, steps - 1),
           "inputs": inputs, "weights": f"{inputs}/weights.safetensors", "batches": f"{inputs}/batches.u8",
           "result": f"{log}.result"}
    for old in glob.glob(glob.escape(job["result"]) + ".*"):
        os.remove(old)
    began = time.time()
    wire = run_zeroth(job, log) if system in ZEROTH else run_peer(job, log)
    ranks = []
    for rank in range(WORLD):
        with open(f"{job['result']}.{rank}", encoding="utf-8") as figures:
            ranks.append(json.load(figures))
    tokens = (steps - job["warm"]) * WORLD * shape["samples"] * shape["context"]
    figures = {"tokens_per_s": tokens / max(r["seconds"] for r in ranks),
               "peak_mib": max(r["peak_kib"] for r in ranks) / 1024,
               "communication_mib": (ranks[0]["communication_bytes"] if wire is None else wire) / 2**20,
               "loss": sum(r["loss"] for r in ranks) / WORLD,
               "first_s": max(r["first_step_at"] for r in ranks) - began}
    if "idle_kib" in ranks[0]:
        figures["idle_mib"] = max(r["idle_kib"] for r in ranks) / 1024
    return figures


def prepare(size):
    shape, text = SIZES[size], f"{ROOT}/build/data/jargon.txt.gz"
    if not os.path.exists(text):
        sys.exit(f"peers: error: no {text}; remedy: make setup")
    done = subprocess.run([f"{PLACE}/venv/bin/python", f"{HERE}/prepare.py", f"{PLACE}/inputs/{size}",
                           *(str(shape[k]) for k in ("layers", "width", "heads", "context", "samples")), str(WORLD),
                           text], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"peers: error: cannot create the inputs: {done.stderr.strip().splitlines()[-1]}; remedy: delete "
                 f"{PLACE}/venv and run `make peers` again")
    return done.stdout.strip()


def output(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def about():
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        cpu = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())
    frozen = dict(line.split("==") for line in output([f"{PLACE}/venv/bin/pip", "freeze"]).split() if "==" in line)
    return {"machine": f"{cpu}, {os.cpu_count()} cores, Linux {platform.release()}",
            "versions": f"python {platform.python_version()}, torch {frozen.get('torch')}, deepspeed "
                        f"{frozen.get('deepspeed', 'MISSING: see build/peers/install.log')}, zeroth "
                        f"{output(['git', 'describe', '--always', '--dirty'])}",
            "job": f"{WORLD} ranks x 1 thread, AdamW, no clipping; S: 6 x 384, 4 x 256 tokens per rank; "
                   "M: 12 x 768, 2 x 256",
            "peers": "gloo over loopback; Zeroth: shm, communicator.share_weights at its default",
            "peak MiB": "VmHWM of the larger rank, including shared pages; idle: before the model is built",
            "comm MiB": "per step, both ranks; peers: bytes that the loopback interface received, with headers and "
                        "other programs' traffic; Zeroth: its own count of bytes moved through shared memory",
            "first s": "from starting the ranks (Zeroth: the launcher) to the end of the first step"}


def write(measured):
    with open(f"{PLACE}/table.json", "w", encoding="utf-8") as out:
        json.dump(measured, out, indent=1)
    text = table.render(measured)
    with open(f"{PLACE}/table.txt", "w", encoding="utf-8") as out:
        out.write(text)
    return text


def choose(name, size, dtype):
    """The warm-up round: chooses the setting that is faster on this machine."""
    best, errors = None, []
    for setting in settings(name, dtype):
        try:
            rate = run(name, setting, size, dtype, TRIAL)["tokens_per_s"]
        except (Failed, OSError, KeyError, ValueError) as e:
            errors.append(f"{setting}: {e}" if setting else str(e))
            continue
        if best is None or rate > best[0]:
            best = (rate, setting)
    if best is None:
        return {"setting": "", "error": "; ".join(errors), "rounds": []}
    return {"setting": best[1], "error": None, "rounds": [], "not_run": errors}


def measure(case, measured, rounds):
    size, dtype = case["size"], case["dtype"]
    for name in case["names"]:
        case["systems"][name] = choose(name, size, dtype)
        print(f"peers: {size} {dtype} {name}: {case['systems'][name]['error'] or 'runs'}", flush=True)
        write(measured)
    for number in range(rounds):
        for name, system in case["systems"].items():
            if system["error"]:
                continue
            try:
                system["rounds"].append(run(name, system["setting"], size, dtype, case["steps"]))
                print(f"peers: {size} {dtype} round {number + 1}/{rounds} {name}: "
                      f"{system['rounds'][-1]['tokens_per_s']:.0f} tokens/s", flush=True)
            except (Failed, OSError, KeyError, ValueError) as e:
                system["error"] = str(e)
                print(f"peers: {name} failed: {e}", flush=True)
            write(measured)  # keeps the results after an interruption


def main():
    words = argparse.ArgumentParser(prog="peers", description=__doc__)
    words.add_argument("--sizes", default="S,M")
    words.add_argument("--dtypes", default="fp32,bf16")
    words.add_argument("--systems", default=",".join(PEERS + ZEROTH))
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--steps", type=int, help="instead of 20 (S) and 10 (M)")
    asked = words.parse_args()
    names = asked.systems.split(",")
    unknown = [n for n in names if n not in PEERS + ZEROTH] + [s for s in asked.sizes.split(",") if s not in SIZES] + \
        [d for d in asked.dtypes.split(",") if d not in ("fp32", "bf16")]
    if unknown or asked.rounds < 1 or (asked.steps or 2) < 2:
        sys.exit(f"peers: error: {', '.join(unknown) or 'rounds or steps'}; remedy: see --help; systems are "
                 f"{', '.join(PEERS + ZEROTH)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that cleanup code runs
    shutil.rmtree(f"{PLACE}/logs", ignore_errors=True)
    os.makedirs(f"{PLACE}/logs")
    measured = {"about": about(), "cases": []}
    load = os.getloadavg()[0]
    if load > 0.5:
        measured["about"]["NOISE"] = (f"the machine was busy (load {load:.1f}) at the start: losses, bytes and "
                                      "memory are valid, speeds and times are not")
    for size in asked.sizes.split(","):
        measured["about"][f"size {size}"] = prepare(size)
        for dtype in asked.dtypes.split(","):
            case = {"size": size, "dtype": dtype, "steps": asked.steps or SIZES[size]["steps"], "names": names,
                    "systems": {}}
            measured["cases"].append(case)
            measure(case, measured, asked.rounds)
    print(write(measured), end="")
    print("peers: build/peers/table.txt, build/peers/table.json")


if __name__ == "__main__":
    main()
