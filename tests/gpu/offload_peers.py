"""Times training steps of a peer that keeps optimizer states in host memory, with the GPT of `run step`, on one device.

offload_peers.py DEVICE SYSTEM LAYERS WIDTH HEADS CONTEXT SAMPLES STEPS
SYSTEM: deepspeed2 (ZeRO-2, offload_optimizer, DeepSpeedCPUAdam), fsdp2 (CPUOffloadPolicy, fused AdamW on the CPU).
Both train in bf16 with fp32 masters. Prints lines of JSON like gpu_step: the median over the steps, after two that are
not counted; the device is idle before and after each.
"""
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from model import GPT

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def fsdp2(device, shape, _samples):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
               "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")}
    model = GPT(*shape)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens, following):
        model(tokens, following).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def deepspeed2(device, shape, samples):
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    config = {"train_micro_batch_size_per_gpu": samples, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
              "steps_per_print": 1 << 30, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": True,
                                    "offload_optimizer": {"device": "cpu", "pin_memory": device.type != "cpu"}}}
    model = GPT(*shape)
    optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(tokens, following):
        engine.backward(engine(tokens, following))
        engine.step()
    return step


SYSTEMS = {"deepspeed2": deepspeed2, "fsdp2": fsdp2}


def main():
    if len(sys.argv) != 9 or sys.argv[2] not in SYSTEMS:
        sys.exit(__doc__)
    device, system = torch.device(sys.argv[1]), sys.argv[2]
    *shape, samples, steps = (int(word) for word in sys.argv[3:])
    on_gpu = device.type != "cpu"
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    if on_gpu:
        torch.cuda.set_device(0)
    backend = "nccl" if on_gpu else "gloo"
    if system == "deepspeed2":
        import deepspeed
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
    else:
        dist.init_process_group(backend)

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    torch.manual_seed(1)
    step = SYSTEMS[system](device, shape, samples)
    tokens, following = (torch.randint(0, 256, (samples, shape[3])).to(device) for _ in range(2))
    times = []
    for _ in range(2 + steps):
        wait()
        begin = time.perf_counter()
        step(tokens, following)
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    median = round(statistics.median(times[2:]), 2)
    rate = round(1e3 * samples * shape[3] / median, 1)
    print(json.dumps({"row": f"{system} with states in host memory: step", "ms": median, "tokens_per_s": rate}))
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    print(json.dumps({"row": f"{system}: peak of the device's memory", "bytes": peak}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
