"""The wheel in a fresh venv, with nothing of the repository in reach: wheel_test.py ROOT. torch is that of the shared
environment, through a link in site-packages beside the package."""

import glob
import os
import pathlib
import subprocess
import sys
import tempfile

TRAIN = """
import torch, zeroth
assert "site-packages" in zeroth.__file__, zeroth.__file__
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {"strategy": "zero3", "optimizer": "adamw", "train.steps": 3, "train.global_batch": 2, "train.micro_batch": 1}
with zeroth.Engine(model, config) as engine:
    while not engine.done:
        engine.backward(model(torch.ones(4, 8)).pow(2).mean())
        engine.step()
    digest = engine.weights_hash()
    print("hash", digest, engine.world, flush=True)
"""


def main(root):
    (wheel,) = glob.glob(f"{root}/build/wheel/zeroth-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        venv = pathlib.Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (site,) = venv.glob("lib/python3*/site-packages")
        subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, site], check=True)
        for program in (site / "zeroth/bin").iterdir():
            program.chmod(0o755)  # as pip installs them
        shared = next(pathlib.Path(f"{root}/build/deps/python").glob("lib/python3*/site-packages"))
        for name in ("torch", "torchgen", "functorch"):
            (site / name).symlink_to(f"{root}/build/deps/torch/{name}")
        (site / "nvidia").symlink_to(f"{root}/build/deps/torch/nvidia")
        (site / "shared.pth").write_text(f"{shared}\n")
        if (stubs := pathlib.Path(f"{root}/build/deps/python/stubs")).exists():
            (venv / "stubs").symlink_to(stubs)
        for file in shared.glob("torch.pth"):  # the empty libraries in place of those of CUDA
            (site / "stubs.pth").write_text(
                "\n".join(line for line in file.read_text().splitlines() if line.startswith("import"))
            )
        script = pathlib.Path(folder) / "train.py"
        script.write_text(TRAIN)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("ZR_", "PYTHON"))}
        python = venv / "bin/python"

        def run(*command):
            return subprocess.run(
                list(map(str, command)), cwd=folder, env=clean, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        zeroth = [python, "-c", "from zeroth._command import zeroth; zeroth()"]
        lines = run(python, script) + run(*zeroth, "launch", "-n", "2", "--", python, script)
        hashes = [line.split()[-3:] for line in lines.splitlines() if "hash " in line]
        assert len({digest for _, digest, _ in hashes}) == 1 and {n for *_, n in hashes} == {"1", "2"}, lines
        assert "zero3" in run(*zeroth, "plugins")
        assert "usage" in run(python, "-c", "from zeroth._command import zeroth_conform as run; run()", "--help")
    print("the wheel trains")


main(sys.argv[1])
