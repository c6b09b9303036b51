"""Writes the initial weights and the batches once: prepare.py FOLDER LAYERS WIDTH HEADS CONTEXT SAMPLES WORLD TEXT"""
import gzip
import os
import random
import sys

import torch
from model import GPT, initialise, write_weights

STEPS = 256


def main():
    folder, (layers, width, heads, context, samples, world), text = sys.argv[1], map(int, sys.argv[2:8]), sys.argv[8]
    os.makedirs(folder, exist_ok=True)
    model = GPT(layers, width, heads, context)
    initialise(model, layers, seed=0)
    write_weights(f"{folder}/weights.safetensors", model)
    with gzip.open(text) as file:
        text = file.read()
    draw = random.Random(0)
    with open(f"{folder}/batches.u8", "wb") as out:
        for _ in range(STEPS * world * samples):
            at = draw.randrange(len(text) - context - 1)
            out.write(text[at:at + context + 1])
    print(sum(p.numel() for p in model.parameters()), "parameters, torch", torch.__version__)


if __name__ == "__main__":
    main()
