"""Runs the cases of the files cases_*.py in this process, a rank of a job: cases.py [WORD...], those whose names have
a word.

Prints a line per case, and ends with 1 if one has failed. A job runs many cases, because starting Python takes
seconds."""

import glob
import importlib
import pathlib
import sys
import time
import traceback

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch

import support
import zeroth


def main(words):
    torch.set_num_threads(1)
    for file in sorted(glob.glob(str(HERE / "cases_*.py"))):
        importlib.import_module(pathlib.Path(file).stem)
    chosen = {n: c for n, c in support.CASES.items() if not words or any(word in n for word in words)}
    assert chosen, f"no case has one of {words}"
    rank = zeroth.Program(support.config()).rank
    failed = []
    for name, function in chosen.items():
        begin = time.monotonic()
        try:
            function()
            result = "passed"
        except Exception:
            failed.append(name)
            result = "FAILED\n" + traceback.format_exc()
        if rank == 0 or result != "passed":
            print(f"{name}: {result} ({time.monotonic() - begin:.1f} s)", flush=True)
    if failed:
        print(f"rank {rank}: {len(failed)} of {len(chosen)} cases failed: {' '.join(failed)}", flush=True)
        return 1
    if rank == 0:
        print(f"{len(chosen)} cases passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
