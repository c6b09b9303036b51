"""Scopes: full values of sharded parameters, models without memory, and recomputation."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import torch

from ._binding import classes
from ._errors import call, callbacks

Result = TypeVar("Result")


class Scope:
    """A scope for a `with` block."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin, self._native = begin, None

    def __enter__(self) -> None:
        self._native = call(self._begin)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        native, self._native = self._native, None
        if native is not None:
            call(native.end, kind is not None)


def gather(parameters: torch.Tensor | Iterable[torch.Tensor]) -> Scope:
    """A scope in which parameters have their full values in ordinary memory: `with zeroth.gather(model.parameters()):`.

    In it, `.numpy()`, `.data_ptr()`, `torch.save` and other code that reads or writes through pointers works. The end
    of the scope stores what was written in the engine: write the same values on all ranks. If an exception ends a
    scope that wrote values, these parameters are undefined until they are set again. Tensors that no engine trains
    are left as they are. Each rank needs memory for the full values.

    The begin and the end are collective. Use it on the training thread, and end it before `engine.step()`.

    Args:
        parameters: one parameter, or several.

    Raises:
        zeroth.Error: another call is running, or ranks make different calls.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return Scope(lambda: classes().Scope.gather(tensors))


def deferred() -> Scope:
    """A scope in which a model is built without memory for its parameters: `with zeroth.deferred(): model =
    T5(config)`.

    The operators of the constructors are recorded, and run when the engine of the model is made: one full parameter
    at a time, straight into this rank's shards. All values are then those of an ordinary construction at this place,
    bit for bit, and generators of random numbers are left as an ordinary construction leaves them. The tensors have
    no values before the engine exists. Not collective.

    Raises:
        UserError: a constructor needs the values of a tensor, as `item()` does; the text names the operator. Errors of
            operators that depend on values are raised when the engine is made.
    """
    return Scope(lambda: classes().Scope.deferred())


def checkpoint(function: Callable[..., Result], *inputs: Any, **options: Any) -> Result:
    """Returns `function(*inputs, **options)`, and recomputes it in backward instead of keeping its activations.

    Results are those without it, bit for bit, under every strategy: the second run has the same random numbers, grad
    mode and autocast mode. Calls can be nested. Pass tensors as inputs instead of capturing them. `function` must run
    the same operators both times. `torch.utils.checkpoint.checkpoint` works too; this one also keeps batch norm's
    running statistics from being updated twice, and finds tensors that were changed in between. Not collective.

    Raises:
        UserError: in backward, if the block cannot run again as it ran first; the text says what to change.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, **options)
    places = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    names = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
    kept = [None if isinstance(value, torch.Tensor) else value for value in inputs]
    kept_options = {name: None if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    tensors = [inputs[i] for i in places] + [options[name] for name in names]
    mailbox = classes().Mailbox()

    def again() -> None:
        values = iter(mailbox.arguments())
        arguments, keywords = list(kept), dict(kept_options)
        for i in places:
            arguments[i] = next(values)
        for name in names:
            keywords[name] = next(values)
        function(*arguments, **keywords)

    native = call(classes().Scope.recompute, tensors, mailbox, _blocks.add(again))
    try:
        result = function(*inputs, **options)
    except BaseException:
        call(native.end, True)
        raise
    call(native.end, False)
    return result


class _Blocks:
    """The blocks of checkpoint() that the binding may run again, by number, until their autograd graphs are freed."""

    def __init__(self) -> None:
        self._blocks: dict[int, Callable[[], None]] = {}
        self._count = 0
        self._pointers: Any = None

    def add(self, block: Callable[[], None]) -> int:
        if self._pointers is None:
            run = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)(callbacks.guard_code(lambda i: self._blocks[i]()))
            free = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)(lambda i: self._blocks.pop(i, None) and 0 or 0)
            self._pointers = run, free
            classes().Scope.set_blocks(*(ctypes.cast(pointer, ctypes.c_void_p).value for pointer in self._pointers))
            atexit.register(classes().Scope.set_blocks, 0, 0)  # no call after the interpreter's end
        self._count += 1
        self._blocks[self._count] = block
        return self._count


_blocks = _Blocks()
