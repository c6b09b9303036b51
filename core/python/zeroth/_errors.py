"""The errors of Zeroth, and how they come out of the binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")


class Error(RuntimeError):
    """A failure. The text says what failed, where, why, and what to do. Its subclass says who can remedy it."""

    exit_code = 70
    """The exit code of a rank that ends with this error: 2, 3, 4 or 70."""


class UserError(Error):
    """Wrong input: a file, a key, an argument, or a call that the documentation forbids. A rejected call has no
    effect, unless its documentation says otherwise."""

    exit_code = 2


class EnvironmentError(Error):
    """The machine lacks a resource or a file: memory, disk space, a plug-in, a permission."""

    exit_code = 3


class PeerLostError(Error):
    """Another rank ended or does not answer, or ranks made different calls. No collective method of the job's engines
    can succeed after it."""

    exit_code = 4


class PeerFailedError(Error):
    """A collective call failed on another rank, which has the exception, such as that of a callback. The model is
    unchanged, and the engine can be used."""

    exit_code = 4


class InternalError(Error):
    """A bug in Zeroth or in a plug-in."""

    exit_code = 70


_CLASSES: dict[str, type[Error]] = {
    kind.__name__: kind for kind in (UserError, EnvironmentError, PeerLostError, PeerFailedError, InternalError)
}
for _kind in (Error, *_CLASSES.values()):
    _kind.__module__ = "zeroth"  # where users import them from
_MARK = "\x1f"  # core/python/boundary.hpp


class Callbacks:
    """The exceptions of functions of the program that the binding has called, until they are raised again."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None

    def guard_code(self, function: Callable[..., Any]) -> Callable[..., int]:
        """A function that calls `function` and returns 0, or 1 after it has kept its exception."""

        def guarded(*arguments: Any) -> int:
            try:
                function(*arguments)
                return 0
            except BaseException as error:
                self._raised = error
                return 1

        return guarded

    def keep(self, error: BaseException) -> None:
        """Keeps an exception to raise it again."""
        self._raised = error

    def take(self) -> BaseException | None:
        """The exception that was kept last, which is then forgotten."""
        error, self._raised = self._raised, None
        return error


callbacks = Callbacks()


def raise_translated(error: RuntimeError) -> NoReturn:
    """Raises the error of Zeroth that came out of the binding as `error`, or `error` itself."""
    text = str(error)
    at = text.find(_MARK + "zeroth:")
    if at < 0:
        raise error
    kind, _, message = text[at + len(_MARK) + len("zeroth:") :].partition(_MARK)
    if kind == "exit":
        raise SystemExit(int(message)) from None
    if kind == "callback":
        cause = callbacks.take()
        if cause is not None:
            raise cause
    raise _CLASSES.get(kind, InternalError)(message) from None


def call(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function of the binding, whose errors are raised as those of Zeroth."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise_translated(error)
