"""The training loop that docs/numerics.md describes, in plain Python: every weight must come out bit for bit."""

import math

import numpy
import torch

SEED, MICRO_BATCHES = 3, 2


def seed_of(base, *values):
    """docs/numerics.md, section 1: the seed of the model's random numbers."""
    mask = (1 << 64) - 1
    x = base
    for value in values:
        x = (x + 0x9E3779B97F4A7C15 + value) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x = x ^ (x >> 31)
    return x


class AdamW:
    """Section 4: AdamW, every operation rounded to fp32."""

    def __init__(self, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.state, self.steps = {}, 0

    def step(self, parameters):
        f, (b1, b2) = numpy.float32, self.betas
        self.steps += 1
        correction = math.sqrt(1 - b2**self.steps)
        decay, g1, g2 = f(1 - self.lr * self.weight_decay), f(1 - b1), f(1 - b2)
        rate, eps = f((self.lr * correction) / (1 - b1**self.steps)), f(self.eps * correction)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            g, w = parameter.grad.numpy(), parameter.detach().numpy()
            m, v = self.state.setdefault(parameter, (numpy.zeros_like(w), numpy.zeros_like(w)))
            m[...] = (m * f(b1)) + (g * g1)
            v[...] = (v * f(b2)) + ((g * g2) * g)
            w[...] = (w * decay) - ((m * rate) / (numpy.sqrt(v) + eps))


def train(model, loss_of, steps=3):
    """Trains `model` in place. `loss_of(step, micro)` is the loss of a micro-batch.

    Returns the mean losses of the steps."""
    optimizer, losses = AdamW(), []
    for step in range(steps):
        model.zero_grad()
        total = 0.0
        for micro in range(MICRO_BATCHES):
            torch.manual_seed(seed_of(SEED, step, micro))
            loss = loss_of(step, micro)
            loss.backward()
            total += loss.item()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= MICRO_BATCHES  # a power of two, so this is exact
        optimizer.step(model.parameters())
        losses.append(total / MICRO_BATCHES)
    return losses
