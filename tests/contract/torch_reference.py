"""Writes torch_reference.txt: weights after steps of torch.optim.Adafactor and torch.optim.Muon.

The tests read that file; they run neither Python nor this script. Needs PyTorch for Python, for example that of
.ci/peers: build/peers/venv/bin/python tests/contract/torch_reference.py > tests/contract/torch_reference.txt
"""

import math

import numpy
import torch


class Numbers:
    """The pseudo-random numbers of tensor_problem.hpp, in (-1, 1)."""

    def __init__(self):
        self.state = 1

    def next(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        high = self.state >> 32
        return numpy.float32(high - 2**32 if high >= 2**31 else high) * numpy.float32(2**-31)


def gradient(numbers, count):
    grad = numpy.empty(count, numpy.float32)
    for i in range(count):
        value = numbers.next()
        grad[i] = value * numpy.float32(math.pow(10.0, float(numpy.float32(2) * numbers.next())))
    return grad


CASES = [
    # id of the plug-in, keys that differ from the defaults, class, its options, learning rate, shape
    ("adafactor", "", torch.optim.Adafactor, {}, 0.5, (12, 20)),
    ("adafactor", "", torch.optim.Adafactor, {}, 0.5, (96, 16)),
    ("adafactor", "", torch.optim.Adafactor, {}, 0.5, (50,)),
    ("adafactor", "beta2_decay=-0.5 clip_threshold=2 weight_decay=0.1 eps2=0.01", torch.optim.Adafactor,
     {"beta2_decay": -0.5, "d": 2.0, "weight_decay": 0.1, "eps": (None, 0.01)}, 2.0, (12, 20)),
    ("muon", "", torch.optim.Muon, {}, 1.0, (12, 20)),
    ("muon", "", torch.optim.Muon, {}, 1.0, (40, 24)),
    ("muon", "adjust_lr=match_rms_adamw", torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}, 1.0, (10, 32)),
    ("muon", "nesterov=0 momentum=0.8 weight_decay=0.3", torch.optim.Muon,
     {"nesterov": False, "momentum": 0.8, "weight_decay": 0.3}, 1.0, (18, 18)),
]
STEPS = 3


def main():
    print(f"# Written by torch_reference.py with torch {torch.__version__}: the weights after each of {STEPS} steps.")
    for plugin, keys, kind, options, rate, shape in CASES:
        numbers = Numbers()
        count = math.prod(shape)
        initial = numpy.array([numbers.next() for _ in range(count)], numpy.float32)
        weight = torch.nn.Parameter(torch.from_numpy(initial).reshape(shape))
        optimizer = kind([weight], lr=rate, **options)
        print(f"\n{plugin} {rate} {'x'.join(map(str, shape))} {keys}".rstrip())
        for _ in range(STEPS):
            weight.grad = torch.from_numpy(gradient(numbers, count)).reshape(shape)
            optimizer.step()
            print(" ".join(f"{value:.9g}" for value in weight.detach().flatten().tolist()))


main()
