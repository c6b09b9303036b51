#!/usr/bin/env python3
"""`make peers`: trains one GPT with every system in turn. Standard library only; torch is in build/peers/venv.

A round runs every system once, in separate processes; ratios compare runs of one round. A warm-up round comes first:
it compiles DeepSpeed's extensions, fills the page cache, and chooses the faster of a system's settings: DeepSpeed's CPU
Adam or torch's fused Adam; in bf16, DDP's gradients in fp32 or compressed to bf16.
"""
import argparse
import glob
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time

import table
from hosts import HOSTS, ROOT, Unavailable, link_speed
from processes import Failed, finish, start

HERE = os.path.dirname(os.path.abspath(__file__))
PLACE = os.path.join(ROOT, "build/peers")
WORLD, WARM, TRIAL = 2, 3, 5
SIZES = {"S": {"layers": 6, "width": 384, "heads": 6, "context": 256, "samples": 4, "steps": 20},
         "M": {"layers": 12, "width": 768, "heads": 12, "context": 256, "samples": 2, "steps": 10}}
# One sequence of 64 tokens per rank.
SIZES |= {"S64": {**SIZES["S"], "context": 64, "samples": 1}, "M64": {**SIZES["M"], "context": 64, "samples": 1}}
PEERS = ["plain", "plain_wire", "ddp", "torch_zero1", "fsdp2_keep", "fsdp2_reshard",
         "deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3"]
ZEROTH = ["zero0", "zero1", "zero2", "zero3"]


def settings(system, dtype):
    """The settings to try for a system; the faster one is used."""
    if system.startswith("deepspeed"):
        return ["cpu_adam", "torch_fused"]
    if system in ("ddp", "torch_zero1") and dtype == "bf16":
        return ["autocast", "compressed"]
    return [""]


def run_peer(job, log, hosts):
    job = {**job, "world": WORLD, "interface": hosts.interface}
    shared = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(hosts.ranks_per_host), "MASTER_ADDR": hosts.address,
              "MASTER_PORT": str(hosts.port), "GLOO_SOCKET_IFNAME": hosts.interface, "DS_ACCELERATOR": "cpu",
              "CUDA_VISIBLE_DEVICES": "", "TORCH_EXTENSIONS_DIR": f"{PLACE}/extensions", "PYTHONUNBUFFERED": "1",
              "PATH": f"{PLACE}/venv/bin:" + os.environ["PATH"]}
    for lock in glob.glob(f"{PLACE}/extensions/**/lock", recursive=True):  # left by a killed run; would hang
        os.remove(lock)
    logs = [f"{log}.{rank}.log" for rank in range(WORLD)]
    command = [f"{PLACE}/venv/bin/python", f"{HERE}/peer.py", json.dumps(job)]
    finish([start(hosts.on_rank(rank, command), logs[rank],
                  {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % hosts.ranks_per_host)})
            for rank in range(WORLD)], logs)


def run_zeroth(job, log, hosts):
    name = os.path.basename(log)
    overrides = {"strategy": job["system"], "job.name": name, "job.runs": f"{PLACE}/runs", "train.steps": job["steps"],
                 "train.micro_batch": job["samples"], "train.dtype": job["dtype"], "peers.inputs": job["inputs"],
                 "peers.result": job["result"], "peers.warm": job["warm"],
                 **{f"model.{key}": job[key] for key in ("layers", "width", "heads", "context")}, **hosts.keys}
    logs = [f"{log}.log"]
    program = [f"{ROOT}/build/bin/peers_zeroth", f"{HERE}/peers.toml",
               *(f"{key}={value}" for key, value in overrides.items())]
    finish([start(hosts.launch(program), logs[0], hosts.environment)], logs)


def communication_bytes(job, log, ranks, hosts):
    """Of all ranks, per step. In shared memory, Zeroth counts them; an interface counts all else."""
    if hosts.ranks_per_host == WORLD and job["system"] in ZEROTH:
        with open(f"{PLACE}/runs/{os.path.basename(log)}/metrics.jsonl", encoding="utf-8") as rows:
            moved = [json.loads(row)["communication_bytes"] for row in rows][job["warm"]:]
        return sum(moved) / len(moved)
    return sum(rank["sent_bytes"] for rank in ranks[::hosts.ranks_per_host])


def run(system, setting, case, steps):
    """Runs one system once and returns its results."""
    size, dtype = case["size"], case["dtype"]
    shape = {key: value for key, value in SIZES[size].items() if key != "steps"}
    log = f"{PLACE}/logs/{size}_{dtype}_{system}" + (f"_{setting}" if setting else "")
    inputs = f"{PLACE}/inputs/{size}"
    job = {**shape, "system": system, "setting": setting, "dtype": dtype, "steps": steps, "warm": min(WARM, steps - 1),
           "inputs": inputs, "weights": f"{inputs}/weights.safetensors", "batches": f"{inputs}/batches.u8",
           "result": f"{log}.result"}
    for old in glob.glob(glob.escape(job["result"]) + ".*"):
        os.remove(old)
    with HOSTS[case["hosts"]]() as hosts:
        began = time.time()
        (run_zeroth if system in ZEROTH else run_peer)(job, log, hosts)
    ranks = []
    for rank in range(WORLD):
        with open(f"{job['result']}.{rank}", encoding="utf-8") as figures:
            ranks.append(json.load(figures))
    seconds = max(r["seconds"] for r in ranks) / (steps - job["warm"])
    figures = {"tokens_per_s": WORLD * shape["samples"] * shape["context"] / seconds,
               "step_ms": 1000 * seconds,
               "peak_mib": max(r["peak_kib"] for r in ranks) / 1024,
               "communication_mib": communication_bytes(job, log, ranks, hosts) / 2**20,
               "loss": sum(r["loss"] for r in ranks) / WORLD,
               "first_s": max(r["first_step_at"] for r in ranks) - began}
    if case["hosts"] > 1:
        figures["sent_mib"] = max(r["sent_bytes"] for r in ranks) / 2**20
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


def about_communication(hosts):
    if hosts == 1:
        return {"peers": "gloo over loopback; Zeroth: shm, communicator.share_weights at its default",
                "comm MiB": "per step, both ranks; peers: bytes that the loopback interface sent, with headers and "
                            "other programs' traffic; Zeroth: its own count of bytes moved through shared memory"}
    return {"hosts": "2 network namespaces of this machine, one rank on each; a link of 10 Gbit/s, tbf, reno",
            "peers": "gloo; Zeroth: mpi, which communicator = auto chooses",
            "comm MiB": "per step, both ranks: bytes that the hosts' interfaces sent",
            "wire ms": "comm MiB of the host that sends more, divided by the speed of the link in this round",
            "limit": "what a step takes at least: a step of plain or wire ms, whichever is longer",
            "plain_wire": "plain, while each rank sends the bytes of zero0: what both take on the same cores"}


def about(hosts):
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        cpu = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())
    frozen = dict(line.split("==") for line in output([f"{PLACE}/venv/bin/pip", "freeze"]).split() if "==" in line)
    return {"machine": f"{cpu}, {os.cpu_count()} cores, Linux {platform.release()}",
            "versions": f"python {platform.python_version()}, torch {frozen.get('torch')}, deepspeed "
                        f"{frozen.get('deepspeed', 'MISSING: see build/peers/install.log')}, zeroth "
                        f"{output(['git', 'describe', '--always', '--dirty'])}",
            "job": f"{WORLD} ranks x 1 thread, AdamW, no clipping; S: 6 x 384, 4 x 256 tokens per rank; "
                   "M: 12 x 768, 2 x 256",
            **about_communication(hosts),
            "peak MiB": "VmHWM of the larger rank, including shared pages; idle: before the model is built",
            "first s": "from starting the ranks (Zeroth: the launcher) to the end of the first step"}


def table_file(hosts):
    return f"{PLACE}/table" + (f"_hosts{hosts}" if hosts > 1 else "")


def write(measured):
    with open(f"{table_file(measured['hosts'])}.json", "w", encoding="utf-8") as out:
        json.dump(measured, out, indent=1)
    text = table.render(measured)
    with open(f"{table_file(measured['hosts'])}.txt", "w", encoding="utf-8") as out:
        out.write(text)
    return text


def choose(name, case):
    """The warm-up round: chooses the setting that is faster on this machine."""
    best, errors = None, []
    for setting in settings(name, case["dtype"]):
        try:
            rate = run(name, setting, case, TRIAL)["tokens_per_s"]
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
        case["systems"][name] = choose(name, case)
        print(f"peers: {size} {dtype} {name}: {case['systems'][name]['error'] or 'runs'}", flush=True)
        write(measured)
    for number in range(rounds):
        if case["hosts"] > 1:
            case["link"].append(link_speed())
        for name, system in case["systems"].items():
            if system["error"]:
                continue
            try:
                system["rounds"].append(run(name, system["setting"], case, case["steps"]))
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
    words.add_argument("--systems", help="all, unless named; plain_wire on two hosts only")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--steps", type=int, help="instead of 20 (S) and 10 (M)")
    words.add_argument("--hosts", type=int, default=1, choices=list(HOSTS), help="2: a rank on each of two hosts")
    asked = words.parse_args()
    names = asked.systems.split(",") if asked.systems else \
        [n for n in PEERS + ZEROTH if n != "plain_wire" or asked.hosts > 1]
    unknown = [n for n in names if n not in PEERS + ZEROTH] + [s for s in asked.sizes.split(",") if s not in SIZES] + \
        [d for d in asked.dtypes.split(",") if d not in ("fp32", "bf16")]
    if unknown or asked.rounds < 1 or (asked.steps or 2) < 2:
        sys.exit(f"peers: error: {', '.join(unknown) or 'rounds or steps'}; remedy: see --help; systems are "
                 f"{', '.join(PEERS + ZEROTH)}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # so that cleanup code runs
    shutil.rmtree(f"{PLACE}/logs", ignore_errors=True)
    os.makedirs(f"{PLACE}/logs")
    if asked.hosts > 1:
        link_speed()  # fails here if there cannot be hosts, not after the warm-up round
    measured = {"about": about(asked.hosts), "cases": [], "hosts": asked.hosts}
    load = os.getloadavg()[0]
    if load > 0.5:
        measured["about"]["NOISE"] = (f"the machine was busy (load {load:.1f}) at the start: losses, bytes and "
                                      "memory are valid, speeds and times are not")
    for size in asked.sizes.split(","):
        measured["about"][f"size {size}"] = prepare(size)
        for dtype in asked.dtypes.split(","):
            case = {"size": size, "dtype": dtype, "steps": asked.steps or SIZES[size]["steps"], "names": names,
                    "hosts": asked.hosts, "link": [], "systems": {}}
            measured["cases"].append(case)
            measure(case, measured, asked.rounds)
    print(write(measured), end="")
    print(f"peers: {table_file(asked.hosts)}.txt, {table_file(asked.hosts)}.json")


if __name__ == "__main__":
    try:
        main()
    except Unavailable as e:
        sys.exit(f"peers: error: {e}")
