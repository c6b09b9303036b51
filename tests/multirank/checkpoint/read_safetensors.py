"""Opens a Hugging Face style folder as its loaders do: index, then each file. Prints name, dtype and bytes in hex."""
import json
import os
import sys

from safetensors import deserialize, safe_open

folder = sys.argv[1]
with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as file:
    index = json.load(file)["weight_map"]
raw = {}  # numpy has no bfloat16: use the raw bytes from the package
for part in set(index.values()):
    with open(os.path.join(folder, part), "rb") as file:
        raw.update(dict(deserialize(file.read())))
for name, part in index.items():
    if raw[name]["dtype"] == "BF16":
        print(name, "bfloat16", bytes(raw[name]["data"]).hex())
        continue
    with safe_open(os.path.join(folder, part), framework="np") as tensors:
        value = tensors.get_tensor(name)
        print(name, value.dtype, value.tobytes().hex())
