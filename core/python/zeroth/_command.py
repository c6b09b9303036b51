"""The console scripts of the package: they start the programs in its folder bin/."""

import os
import sys
from typing import NoReturn


def _run(name: str) -> NoReturn:
    program = os.path.join(os.path.dirname(os.path.realpath(__file__)), "bin", name)
    try:
        os.execv(program, [program, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{name}: error: cannot start {program}: {error.strerror}; install the package zeroth again")


def zeroth() -> NoReturn:
    _run("zeroth")


def zeroth_conform() -> NoReturn:
    _run("zeroth-conform")
