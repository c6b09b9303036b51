"""The configuration of a job."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

from ._binding import classes
from ._errors import UserError, call

Value: TypeAlias = "bool | int | float | str | Sequence[Value] | Mapping[str, Value]"
"""A value of a configuration: what TOML has, without dates."""


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Which rank of which job this process is, for a program that knows it from elsewhere than a launcher's
    variables."""

    rank: int = 0
    """Of this process, 0 to world - 1."""
    world: int = 1
    """Number of ranks of the job, at most 4096."""
    address: str = ""
    """"host:port": where rank 0 listens, the same on all ranks. A job of one rank needs none."""
    token: str = ""
    """A secret that all ranks have. Empty: ranks on one host share one by a file."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the program's own, in a TOML table such as [model]. `zeroth explain` prints it with its meaning."""

    path: str
    """ "table.key"."""
    default: bool | int | float | str | pathlib.PurePath
    """Its type is the type of the key; a path is relative to the file that sets it."""
    meaning: str = ""
    """One line, without a full stop."""
    min: float | None = None
    """Smallest value of a number."""
    max: float | None = None
    """Largest value of a number."""
    choices: Sequence[str] = ()
    """The values that a text can have; empty: any."""


_KINDS: list[tuple[str, type]] = [
    ("bool", bool),  # before int, of which it is a subclass
    ("int", int),
    ("float", float),
    ("path", pathlib.PurePath),
    ("str", object),
]


def _own_keys(keys: Sequence[Key]) -> Any:
    listed = classes().Keys()
    for key in keys:
        value = key.default
        kind = next(name for name, type_ in _KINDS if isinstance(value, type_))
        text = str(value).lower() if kind == "bool" else repr(value) if kind in ("int", "float") else str(value)
        low, high = (-1e18, 1e18) if kind == "int" else (-1e300, 1e300)
        low, high = low if key.min is None else float(key.min), high if key.max is None else float(key.max)
        call(listed.add, key.path, kind, text, key.meaning, low, high, list(key.choices))
    return listed


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _toml_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _toml_text(key)


def _toml_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'


def _toml_value(path: str, value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, os.PathLike)):
        return _toml_text(os.fspath(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(f'{path}.{k}', v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml_value(path, item) for item in value) + "]"
    raise UserError(
        f"the configuration's key {path} is a {type(value).__name__}: a value is a bool, int, float, str, list or dict"
    )


def _leaves(path: str, value: Value) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UserError(f"the configuration has the key {key!r}, but keys are texts such as 'train.steps'")
            yield from _leaves(f"{path}.{key}" if path else key, item)
    else:
        yield path, value


@dataclasses.dataclass
class _Assignments:
    """The keys of a dict, by type, and as TOML what keys alone cannot set: lists of tables."""

    toml: str = ""
    bools: list[tuple[str, bool]] = dataclasses.field(default_factory=list)
    integers: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    numbers: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    texts: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def add(self, values: Mapping[str, Value]) -> None:
        for path, value in _leaves("", values):
            if isinstance(value, bool):
                self.bools.append((path, value))
            elif isinstance(value, int):
                self.integers.append((path, value))
            elif isinstance(value, float):
                self.numbers.append((path, value))
            elif isinstance(value, (str, os.PathLike)):
                self.texts.append((path, os.fspath(value)))
            elif isinstance(value, Sequence):
                self.toml += f"{'.'.join(map(_toml_key, path.split('.')))} = {_toml_value(path, value)}\n"
            else:
                _toml_value(path, value)  # raises


def _name_of_script() -> str:
    script = pathlib.Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    return "notebook" if script == "ipykernel_launcher" else script or "python"


class Program:
    """The configuration of a job, and this process's place in it.

    `zeroth.Engine(model, config, overrides)` makes one by itself. Make it first, before the model, to read the
    program's own keys, or the rank. Immutable: any thread may read it.

    Args:
        config: the path of a TOML file, or a dict: nested, or with dotted keys such as `{"train.steps": 500}`.
        overrides: keys that replace those of `config`, in the form of a dict.
        keys: keys of the program's own.
        rendezvous: which rank this process is, if no launcher's variables say it.

    Raises:
        UserError: the file, a key, or a declaration in `keys` is wrong.
        EnvironmentError: a plug-in is missing, or the ranks cannot connect.
        PeerLostError: another rank ended before the job began.
        SystemExit: `zeroth plan`, `explain`, `train` or `tune` started the process to query its keys.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Value],
        overrides: Mapping[str, Value] | None = None,
        *,
        keys: Sequence[Key] = (),
        rendezvous: Rendezvous | None = None,
    ) -> None:
        file, values = "", _Assignments()
        if isinstance(config, Mapping):
            values.add(config)
        else:
            file = os.fspath(config)
            if not file:
                raise UserError("zeroth.Program: the name of the TOML file is empty; pass a path, or a dict")
        if overrides:
            values.add(overrides)
        if file and values.toml:
            raise UserError(
                f"zeroth.Program: the overrides have a list of tables, but the configuration is the file {file}; write "
                "[[optimizer.groups]] there, or pass the configuration as a dict"
            )
        where = (
            None if rendezvous is None else (rendezvous.rank, rendezvous.world, rendezvous.address, rendezvous.token)
        )
        self._native = call(
            classes().Program.make,
            *(file, values.toml, _name_of_script(), values.bools, values.integers, values.numbers, values.texts),
            *(_own_keys(keys), where),
        )
        _report_exceptions()

    @classmethod
    def from_arguments(cls, arguments: Sequence[str] | None = None, *, keys: Sequence[Key] = ()) -> Program:
        """From the command line of a script, by default `sys.argv`: FILE.toml [path=value ...], or --help.

        Raises what the constructor raises; SystemExit after --help."""
        program = cls.__new__(cls)
        words = list(sys.argv if arguments is None else arguments)
        program._native = call(classes().Program.from_arguments, words, _own_keys(keys))
        _report_exceptions()
        return program

    @property
    def rank(self) -> int:
        """The rank of this process in the job. 0 under `zeroth plan`."""
        return int(self._native.rank())

    @property
    def world(self) -> int:
        """The number of ranks of the job. `job.ranks` under `zeroth plan`."""
        return int(self._native.world())

    @property
    def folder(self) -> str:
        """The absolute path of the folder of the TOML file; without one, of the working directory."""
        return str(self._native.folder())

    def boolean(self, path: str) -> bool:
        """The effective value of a boolean key. Raises UserError if the key is unknown or has another type."""
        return bool(call(self._native.boolean, path))

    def integer(self, path: str) -> int:
        """The effective value of an integer key, such as "train.steps"."""
        return int(call(self._native.integer, path))

    def number(self, path: str) -> float:
        """The effective value of a floating-point or integer key."""
        return float(call(self._native.number, path))

    def text(self, path: str) -> str:
        """The effective value of a string key. "strategy" is the id of the strategy plug-in; other roles alike."""
        return str(call(self._native.text, path))

    def origin(self, path: str) -> str:
        """Where the value of a key was set: "job.toml:35:10", "zeroth.Program" or "default"."""
        return str(call(self._native.origin, path))


def report_failure() -> None:
    """Notes that this process is about to end because of an exception, so that the other ranks say so and summary.json
    does not claim a run without a failure. An uncaught exception of a script does this by itself. Any thread."""
    classes().Program.report_failure()


_hooked = False


def _report_exceptions() -> None:
    """From now on an uncaught exception of the main thread is reported to the launcher and the other ranks."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            report_failure()
        before(kind, error, traceback)

    sys.excepthook = hook
