"""Loads libzeroth_python.so, once, when it is first needed: importing the package loads nothing."""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

import torch

from ._errors import EnvironmentError

TORCH = "2.11"
"""The minor version of torch whose libtorch the binding was built with."""


def _check_torch() -> None:
    version = torch.__version__
    if version.split("+")[0].split(".")[:2] != TORCH.split("."):
        raise EnvironmentError(
            f"zeroth was built for torch {TORCH}, but this environment has torch {version}, whose libtorch is not "
            f"binary compatible: pip install 'torch=={TORCH}.*', or install the zeroth that was built for torch "
            f"{version}"
        )


@functools.cache
def classes() -> Any:
    """The classes of the binding. Raises EnvironmentError if torch has another version, or a library is missing."""
    _check_torch()
    file = pathlib.Path(__file__).resolve().parent / "lib" / "libzeroth_python.so"
    if folder := os.environ.get("ZR_PYTHON_LIBRARIES"):  # a build tree
        file = pathlib.Path(folder) / "libzeroth_python.so"
    try:
        torch.classes.load_library(str(file))
    except OSError as error:
        raise EnvironmentError(
            f"cannot load {file}: {error}; reinstall the zeroth wheel: pip install --force-reinstall --no-deps zeroth"
        ) from None
    torch.classes.zeroth.Program.use_python_words()
    return torch.classes.zeroth
