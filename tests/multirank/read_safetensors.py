"""Opens a Hugging Face style folder as its loaders do: index, then each file. Prints name, dtype and bytes in hex."""
import json
import os
import sys

from safetensors import safe_open

folder = sys.argv[1]
with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as file:
    index = json.load(file)["weight_map"]
for name, part in index.items():
    with safe_open(os.path.join(folder, part), framework="np") as tensors:
        value = tensors.get_tensor(name)
        print(name, value.dtype, value.tobytes().hex())
