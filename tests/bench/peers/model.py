"""The GPT of examples/gpt/model.hpp in Python, with the same names and order, and the inputs that all systems read."""
import json
import math
import struct

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attend(self, x):
        samples, length, width = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(samples, length, width))

    def forward(self, x):
        x = x + self.attend(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)

    def forward(self, tokens, following):
        """Mean nats per byte."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def initialise(model, layers, seed):
    """Initializes as model.hpp: normal 0.02, less for residual projections; biases 0, norms 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                into_residual = "proj." in name or "down." in name
                p.normal_(0, 0.02 / math.sqrt(2 * layers) if into_residual else 0.02, generator=generator)
            else:
                p.fill_(0 if "bias" in name else 1)


def write_weights(path, model):
    """Writes an fp32 safetensors file."""
    header, at = {}, 0
    for name, p in model.named_parameters():
        header[name] = {"dtype": "F32", "shape": list(p.shape), "data_offsets": [at, at + 4 * p.numel()]}
        at += 4 * p.numel()
    text = json.dumps(header).encode()
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, p in model.named_parameters():
            out.write(p.detach().contiguous().numpy().tobytes())


def read_weights(path):
    """Yields names and tensors; holds one tensor in memory at a time."""
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            yield name, torch.frombuffer(bytearray(file.read(end - begin)), dtype=torch.float32).view(entry["shape"])


class Batches:
    """[step][rank][sample][context + 1] bytes; starts over after the last step."""

    def __init__(self, path, world, samples, context):
        self.file = open(path, "rb")  # noqa: SIM115
        self.world, self.shape, self.bytes = world, (samples, context + 1), samples * (context + 1)
        self.count = self.file.seek(0, 2) // (world * self.bytes)

    def of(self, step, rank):
        self.file.seek(((step % self.count) * self.world + rank) * self.bytes)
        batch = torch.frombuffer(bytearray(self.file.read(self.bytes)), dtype=torch.uint8).view(self.shape).long()
        return batch[:, :-1], batch[:, 1:]
