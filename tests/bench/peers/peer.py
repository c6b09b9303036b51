"""One rank of one peer: peer.py '{"system": "ddp", ...}'. Writes results to `result`.RANK; run.py starts it.

Every system at its best settings found here: fused AdamW, gradients as views of the buckets, gradients set to none, no
clipping, nothing read from a tensor within the loop. The model comes without memory (meta) and takes one tensor at a
time from the file, so that no second copy of it is in anyone's peak.
"""
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from model import GPT, Batches, read_weights

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def sent_bytes(interface):
    with open("/proc/net/dev") as lines:
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(interface + ":"))


def built(job):
    with torch.device("meta"):
        return GPT(job["layers"], job["width"], job["heads"], job["context"])


def filled(job):
    model = built(job).to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in read_weights(job["weights"]):
            parameters[name].copy_(tensor)
    return model


def plain_step(model, optimizer, job):
    mixed = torch.autocast("cpu", dtype=torch.bfloat16, enabled=job["dtype"] == "bf16" and "fsdp2" not in job["system"])

    def step(tokens, following):
        with mixed:
            loss = model(tokens, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()
    return step


def wrapped(job):
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(filled(job), gradient_as_bucket_view=True, broadcast_buffers=False,
                                    static_graph=True)
    if job["setting"] == "compressed":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        model.register_comm_hook(dist.group.WORLD, bf16_compress_hook)
    return model


def plain(job):
    """The upper bound: each rank trains alone, without communication."""
    model = filled(job)
    return plain_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), job)


class Exchange:
    """Sends bytes of no meaning to the other of two ranks and receives as many from it, over TCP."""
    CHUNK = bytearray(4 << 20)

    def __init__(self, job, size):
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
        if job["rank"] == 0:
            with socket.create_server(place) as server:
                dist.barrier()
                self.peer = server.accept()[0]
        else:
            dist.barrier()
            self.peer = socket.create_connection(place)
        self.size, self.threads = size, ThreadPoolExecutor(2)

    def start(self):
        self.running = [self.threads.submit(self.send), self.threads.submit(self.receive)]

    def finish(self):
        for one in self.running:
            one.result()

    def send(self):
        for left in range(self.size, 0, -len(self.CHUNK)):
            self.peer.sendall(memoryview(self.CHUNK)[:left])

    def receive(self):
        memory, left = memoryview(bytearray(len(self.CHUNK))), self.size
        while left:
            received = self.peer.recv_into(memory[:left])
            if not received:
                raise ConnectionError("the other rank has ended")
            left -= received


def plain_wire(job):
    """`plain`, while each rank sends as many bytes as under zero0 on two hosts, of which nothing is read or added."""
    train = plain(job)
    count = sum(p.numel() for p in built(job).parameters())
    # Half of the gradients, in the type of the weights, and half of the results, in fp32.
    exchange = Exchange(job, count * (4 + (4 if job["dtype"] == "fp32" else 2)) // 2)

    def step(*batch):
        exchange.start()
        loss = train(*batch)
        exchange.finish()
        return loss
    return step


def ddp(job):
    model = wrapped(job)
    return plain_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), job)


def zero_redundancy(job):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = wrapped(job)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True,
                                        fused=True, **ADAMW)
    return plain_step(model, optimizer, job)


def fsdp2(job):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = dist.device_mesh.init_device_mesh("cpu", (job["world"],))
    kept = {"mesh": mesh, "reshard_after_forward": job["system"] == "fsdp2_reshard"}
    if job["dtype"] == "bf16":
        kept["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = built(job)
    for block in model.blocks:
        fully_shard(block, **kept)
    fully_shard(model, **kept)
    model.to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in read_weights(job["weights"]):
            mine = parameters[name].to_local()
            mine.copy_(torch.chunk(tensor, job["world"])[job["rank"]])
    return plain_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), job)


def deepspeed_step(job):
    import deepspeed
    stage = int(job["system"][-1])
    config = {"train_micro_batch_size_per_gpu": job["samples"], "gradient_accumulation_steps": 1,
              "gradient_clipping": 0.0, "steps_per_print": 1 << 30, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": job["dtype"] == "bf16"},
              "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": False,
                                    "round_robin_gradients": False}}
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = GPT(job["layers"], job["width"], job["heads"], job["context"])
        parameters = dict(model.named_parameters())
        deepspeed.zero.register_external_parameter(model, model.wte.weight)
        for name, tensor in read_weights(job["weights"]):
            with deepspeed.zero.GatheredParameters(parameters[name], modifier_rank=0), torch.no_grad():
                if job["rank"] == 0:
                    parameters[name].copy_(tensor)
    else:
        model = filled(job)
    if job["setting"] == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(tokens, following):
        loss = engine(tokens, following)
        engine.backward(loss)
        engine.step()
        return loss.detach()
    return step


SYSTEMS = {"plain": plain, "plain_wire": plain_wire, "ddp": ddp,
           "torch_zero1": zero_redundancy, "fsdp2_keep": fsdp2, "fsdp2_reshard": fsdp2,
           **{f"deepspeed{stage}": deepspeed_step for stage in range(4)}}


def main():
    job = json.loads(sys.argv[1])
    job["rank"] = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if job["system"].startswith("deepspeed"):
        import deepspeed
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    idle = peak_kib()
    batches = Batches(job["batches"], job["world"], job["samples"], job["context"])
    step = SYSTEMS[job["system"]](job)
    for i in range(job["steps"]):
        loss = step(*batches.of(i, job["rank"]))
        if i == 0:
            first = time.time()
        if i + 1 == job["warm"]:
            sent, begun = sent_bytes(job["interface"]), time.time()
    ended = time.time()
    sent = sent_bytes(job["interface"]) - sent
    with open(f"{job['result']}.{job['rank']}", "w") as out:
        json.dump({"loss": loss.item(), "first_step_at": first, "seconds": ended - begun, "peak_kib": peak_kib(),
                   "idle_kib": idle, "sent_bytes": sent / (job["steps"] - job["warm"])}, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
