"""Loads empty CUDA libraries, so that torch can be imported on a machine without CUDA.

`.ci/setup` copies this module to the site-packages of build/deps/python, where torch.pth imports it at the start of
Python. It also compiles the empty libraries. The loader uses a loaded library for a dependency of torch that has the
same soname. An empty library is not loaded if the real one has been installed since set-up. The empty libraries have
no functions, so torch must be loaded with lazy binding, which is not Python's default.
"""

import ctypes
import os
import sys

STUBS = os.path.join(sys.prefix, "stubs")


def in_wheel(name: str) -> bool:
    """Whether a wheel of NVIDIA has the library; torch loads these itself."""
    for path in sys.path:
        nvidia = os.path.join(path, "nvidia")
        if os.path.isdir(nvidia) and any(
            os.path.exists(os.path.join(nvidia, part, "lib", name)) for part in os.listdir(nvidia)
        ):
            return True
    return False


for stub in sorted(os.listdir(STUBS)):
    if not in_wheel(stub):
        try:
            ctypes.CDLL(stub)  # the loader finds the real library
        except OSError:
            ctypes.CDLL(os.path.join(STUBS, stub))
            sys.setdlopenflags(os.RTLD_LAZY)
