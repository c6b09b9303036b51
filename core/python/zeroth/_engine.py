"""zeroth.Engine: trains a torch.nn.Module."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch

from . import _compiled, _printing
from ._binding import classes
from ._errors import UserError, call, callbacks
from ._loader import loader
from ._model import ModelTensors
from ._program import Program, Rendezvous, Value, report_failure
from ._results import GroupInfo, LoadReport, MemoryUse, ParameterInfo, StepResult
from ._scopes import Scope

Kind = Literal["value", "gradient", "state"]


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _watch(watch: bool) -> None:
    """While an engine exists, Ctrl-C also ends a wait for other ranks, and a sharded parameter can be printed."""
    _printing.watch(watch)
    _compiled.watch(watch)
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
        classes().Program.watch_interrupts(watch and callable(handler))


def _close_all() -> None:
    """Before the interpreter ends: afterwards no function of Python may be called."""
    for engine in list(_engines):
        engine.close()


class Engine:
    """Trains one model with the strategy, optimizer and communicator of a TOML file.

    A process may have several engines with different names; all ranks make and use them in the same order. The engine
    keeps the model; its parameters stay the same tensor objects. Call all methods on the thread that made the engine,
    and not from inside another one, as from a hook. *Collective* methods must be called by all ranks, in the same
    order and with the same arguments; otherwise the job ends with an error that names the calls of both ranks.

    As a `with` block it is closed at the end.

    Args:
        model: the module, on the CPU; built inside `zeroth.deferred()` it needs no memory before. Unchanged, but for
            the memory of its parameters.
        config: the path of a TOML file, a dict, or a `zeroth.Program`.
        overrides: keys that replace those of `config`, such as `{"train.steps": 500}`.
        name: gives this engine folders of its own for metrics and checkpoints: letters, digits, "-" and "_".
        rendezvous: which rank this process is, if no launcher's variables say it.

    Raises:
        UserError: the configuration or the model cannot be used; the text says what to change.
        EnvironmentError: memory, disk or a plug-in is missing.
        SystemExit: `zeroth plan`, `explain` or `tune` asked for the model's parameters, which are printed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: str | os.PathLike[str] | Mapping[str, Value] | Program,
        overrides: Mapping[str, Value] | None = None,
        *,
        name: str = "",
        rendezvous: Rendezvous | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UserError(
                f"zeroth.Engine(model, config): the model is a {type(model).__name__}, not a torch.nn.Module"
            )
        if isinstance(config, Program):
            if overrides or rendezvous:
                raise UserError("zeroth.Engine(model, program): pass overrides and rendezvous to zeroth.Program")
            self._program = config
        else:
            self._program = Program(config, overrides, rendezvous=rendezvous)
        self._module = model
        self._tensors = ModelTensors(model)
        self._callbacks: list[Callable[[StepResult], None]] = []
        self._pointers: dict[str, Any] = {}  # functions that the binding may call
        tensors = self._tensors.tensors()
        self._native = call(classes().Engine, self._program._native, *tensors, name)
        _compiled.note_parameters(self, tensors[1])
        _engines.add(self)
        _watch(True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def __repr__(self) -> str:
        return f"<zeroth.Engine of {type(self._module).__name__}>"

    def _call(self, method: str, *arguments: Any) -> Any:
        return call(getattr(self._native, method), *arguments)

    def _listed(self, method: str, *arguments: Any) -> Any:
        """Calls a method that looks at the tensors that the model has now."""
        self._list_again()
        return call(getattr(self._native, method), *arguments)

    def _list_again(self) -> None:
        if self._tensors.changed():
            tensors = self._tensors.tensors()
            self._native.set_tensors(*tensors)
            _compiled.note_parameters(self, tensors[1])

    @property
    def model(self) -> torch.nn.Module:
        """The module that this engine trains."""
        return self._module

    @property
    def program(self) -> Program:
        """The configuration."""
        return self._program

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Runs autograd for one micro-batch and hands the gradients to the strategy. Frees the autograd graph.
        Collective.

        Args:
            loss: one element, with an autograd graph.
            weight: for micro-batches of unequal size, such as the number of tokens of the labels: the gradients are
                those of sum(weight * loss) / sum(weight) over all ranks and micro-batches of the step. 0, or between
                1.2e-38 and 3.4e38 (fp16: 0.001 to 32768). A micro-batch of weight 0 contributes nothing, even if its
                loss is NaN.

        Raises:
            UserError: the loss has no graph, a parameter was added without `refresh()`, ...; the call has no effect.
            Exception: an exception of a hook or of an autograd function of Python, as itself.
        """
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"engine.backward(loss): the loss is a {type(loss).__name__}, not a tensor")
        self._listed("backward", loss, float(weight))

    def step(self) -> bool:
        """Call it after every `backward()`. Collective.

        Returns:
            True on the accumulation boundary, after it has computed the global norm, clipped the gradients, and updated
            the weights; otherwise False, at once.
        """
        if not self._listed("step"):
            return False
        if self._callbacks:
            result = self.last_step
            for callback in list(self._callbacks):
                callback(result)
        return True

    def add_tokens(self, tokens: int, unit: str = "tokens") -> None:
        """Adds to the number of tokens, or other units, that this rank has processed in the current step, for the rates
        in metrics.jsonl and on the terminal. Not collective."""
        self._call("add_tokens", int(tokens), unit)

    @property
    def last_step(self) -> StepResult:
        """The result of the last step of this engine."""
        return StepResult(*self._call("last_step"))

    def on_step(self, callback: Callable[[StepResult], None]) -> None:
        """Calls `callback` on this rank at the end of every `step()` that returns True, after the checkpoint is
        written. If it raises, `step()` does; the step is finished. Not collective."""
        self._call("step_index")  # the engine is open
        self._callbacks.append(callback)

    def set_lr(self, rate: float) -> None:
        """Sets the learning rate, instead of `optimizer.lr` and [schedule], until the next call of `set_lr()` or
        `set_schedule()`. Groups multiply it by their lr_scale. Checkpoints do not contain it. Collective."""
        self._call("set_lr", float(rate))

    def set_schedule(self, rate: Callable[[int], float] | None) -> None:
        """Sets a schedule: `rate(index)` is the learning rate of update `index`, 0 being the first one of the run and
        skipped steps not counting; the same on all ranks. None restores `optimizer.lr` and [schedule]. If it raises, so
        does `step()`. Checkpoints do not contain it. Collective."""
        if rate is None:
            self._call("set_schedule", 0)
            self._pointers.pop("schedule", None)
            return

        def compute(index: int, failed: Any) -> float:
            try:
                return float(rate(index))
            except BaseException as error:
                callbacks.keep(error)
                failed[0] = 1
                return 0.0

        pointer = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64, ctypes.POINTER(ctypes.c_int32))(compute)
        self._call("set_schedule", _address(pointer))
        self._pointers["schedule"] = pointer

    def set_accumulation(self, accumulation: int) -> None:
        """Sets the number of micro-batches per rank of the following steps, instead of `train.gradient_accumulation`.
        Call it between steps. Checkpoints do not contain it. Collective."""
        self._call("set_accumulation", int(accumulation))

    def edit_gradients(self, edit: Callable[[str, torch.Tensor, int], None] | None) -> None:
        """Lets the program edit gradients in every following step, for example to clip them by value. Collective.

        Args:
            edit: `edit(parameter, gradient, first)` changes `gradient`, a one-dimensional fp32 tensor that is valid
                during the call, in place: elements first to first + numel - 1 of the flattened gradient, averaged,
                without the loss scale. Which elements a rank gets depends on the strategy, so treat each element by
                itself. None ends this.
        """
        mailbox = classes().Mailbox()
        if edit is None:
            self._call("edit_gradients", 0, mailbox)
            self._pointers.pop("edit", None)
            return

        def run(parameter: bytes, first: int) -> None:
            with torch.no_grad():
                edit(parameter.decode(), mailbox.arguments()[0], first)

        pointer = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p, ctypes.c_int64)(callbacks.guard_code(run))
        self._call("edit_gradients", _address(pointer), mailbox)
        self._pointers["edit"] = pointer

    def parameters(self) -> list[ParameterInfo]:
        """The trained and frozen parameters in the model's order. Not collective."""
        return [ParameterInfo(n, tuple(shape), trained, group) for n, shape, trained, group in self._call("parameters")]

    def memory(self) -> list[MemoryUse]:
        """The memory of this rank by tier and kind, with its peaks. Not collective."""
        return [MemoryUse(*row) for row in self._call("memory")]

    def slots(self) -> list[str]:
        """The names of the optimizer's states that `get()` and `set()` accept: fp32, of the parameter's shape."""
        return list(self._call("slots"))

    def groups(self) -> list[GroupInfo]:
        """The groups of [[optimizer.groups]] in the order of the configuration."""
        return [
            GroupInfo(list(match), scale, dict(zip(keys, values, strict=True)), use)
            for match, scale, keys, values, use in self._call("groups")
        ]

    def get(self, parameter: str, kind: Kind = "value", slot: str = "") -> torch.Tensor:
        """A copy of a parameter's fp32 value, gradient, or optimizer state, in its full shape, on the CPU: the same on
        every rank and bit-identical under every strategy. Collective.

        Args:
            parameter: a name from `model.named_parameters()`.
            kind: "value"; "gradient": the one that the optimizer used, from `step()` to the next `backward()`; "state".
            slot: the state of the optimizer, such as "exp_avg".
        """
        return self._as_tensor(self._listed("get", parameter, _checked(kind), slot))

    def set(self, parameter: str, tensor: torch.Tensor, kind: Kind = "value", slot: str = "") -> None:
        """Sets the value or an optimizer state of a parameter on all ranks. `tensor`: dense, real, in the parameter's
        full shape, with the same values on all ranks (they are compared); converted to fp32. Collective."""
        self._listed("set", parameter, _checked(kind), tensor.detach(), slot)

    def buffer(self, name: str) -> torch.Tensor:
        """A copy of a buffer, such as a running statistic; `train.buffers` says of which rank. Collective."""
        return self._as_tensor(self._listed("buffer", name))

    def set_buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Sets a buffer on all ranks to a copy of `tensor`, converted to the buffer's dtype. Collective."""
        self._listed("set_buffer", name, tensor.detach())

    def state_dict(
        self, *, dtype: torch.dtype | None = None, rank0_only: bool = False
    ) -> OrderedDict[str, torch.Tensor]:
        """Copies of all parameters and persistent buffers on the CPU, under the names of `model.state_dict()`.
        Collective.

        Args:
            dtype: of the parameters; default: as the model has them. torch.float32 gives the masters of 16-bit weights.
            rank0_only: the other ranks get an empty dict, and never hold more than one full parameter.
        """
        result: OrderedDict[str, torch.Tensor] = OrderedDict()
        first: dict[int, str] = {}
        for key, value in self._named_state():
            if isinstance(value, torch.nn.Parameter):
                name = first.setdefault(id(value), key)
                if name != key:  # a tied parameter
                    tensor = result.get(name)
                else:
                    tensor = self.get(key).to(dtype or value.dtype)
            else:
                tensor = self.buffer(key).cpu()
            if tensor is not None and (self.rank == 0 or not rank0_only):
                result[key] = tensor
        return result

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """Sets parameters and buffers from `state`, which all ranks pass with the same values. Optimizer states and the
        step stay. Collective.

        Args:
            state: names of `model.state_dict()` and tensors.
            strict: raise UserError, before anything is changed, if a name is missing or unexpected.

        Returns:
            The names that are missing in `state`, and those that the model does not have.
        """
        names = dict(self._named_state())
        missing = [name for name in names if name not in state]
        unexpected = [name for name in state if name not in names]
        if strict and (missing or unexpected):
            raise UserError(
                "engine.load_state_dict(state): "
                + "; ".join(
                    f"{what}: {', '.join(list_[:5])}{f' and {len(list_) - 5} more' if len(list_) > 5 else ''}"
                    for what, list_ in (("missing", missing), ("not in the model", unexpected))
                    if list_
                )
                + "; pass strict=False to load only the tensors that both have"
            )
        done: set[int] = set()
        for name, value in names.items():
            if name not in state or id(value) in done:
                continue
            done.add(id(value))
            if isinstance(value, torch.nn.Parameter):
                self.set(name, state[name])
            else:
                self.set_buffer(name, state[name])
        return missing, unexpected

    def _named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in the order of `model.state_dict()`, without their values."""
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            before = prefix + "." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield before + name, parameter
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield before + name, buffer

    def weights_hash(self) -> str:
        """A hash (16 hexadecimal digits) of all fp32 weights in name order, independent of strategy and number of
        ranks. Collective."""
        return str(self._listed("weights_hash"))

    def finish(self) -> None:
        """Ends a run at another step than `train.steps`: writes the weights hash to summary.json. Collective."""
        self._listed("finish")

    def save(self, folder: str | os.PathLike[str]) -> str:
        """Writes a checkpoint to a new folder in `folder`, whose path it returns. Call it between steps. If it fails,
        all ranks raise, and existing checkpoints are unchanged. Collective."""
        return str(self._listed("save", os.fspath(folder)))

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        weights_only: bool = False,
        strict: bool = True,
        convert: bool = False,
        fallback: bool = False,
    ) -> LoadReport:
        """Loads a checkpoint: one that any strategy and number of ranks wrote, the newest one in `folder`, safetensors
        weights of another program, or a file of torch.save(model.state_dict()). Collective.

        Args:
            folder: a folder or a file.
            weights_only: keep the current step; reset the optimizer states.
            strict: False: report tensors that do not match, and leave them unchanged.
            convert: accept weights of another dtype.
            fallback: if a checkpoint is damaged, warn and load the previous one.
        """
        return LoadReport(*self._listed("load", os.fspath(folder), weights_only, strict, convert, fallback))

    def refresh(self) -> None:
        """Adapts the engine to the model's current parameters, after the program has added, replaced or removed some,
        or changed requires_grad. What was trained before keeps its value, states and step count bit for bit. Call it
        between steps, with the same changes on all ranks. Collective."""
        self._listed("refresh")

    def release(self, dtype: torch.dtype | None = None) -> None:
        """Ends this engine and gives the model full, ordinary parameters: in `engine.dtype`, or in torch.float32. Then
        plain PyTorch uses the model. Optimizer states are lost: call `save()` first. Collective."""
        if dtype not in (None, self.dtype, torch.float32):
            raise UserError(f"engine.release(dtype): dtype is {dtype}, but must be engine.dtype or torch.float32")
        self._listed("release", dtype is torch.float32)
        self.close()

    def close(self, *, failed: bool = False) -> None:
        """Leaves the job: writes summary.json. Parameters that the strategy shards have no values afterwards; call
        `release()` instead to keep them. Again: no effect. Not collective.

        Args:
            failed: an exception ends the run; the other ranks say so.
        """
        _engines.discard(self)
        _compiled.forget(self)
        _watch(bool(_engines))
        call(self._native.close, failed)
        self._pointers.clear()

    def mean(self, value: float) -> float:
        """The mean of `value` over ranks, summed in rank order. Collective."""
        return float(self._call("mean", float(value)))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, element by element, in rank order; 16-bit types in fp32 with one rounding at the end. The
        tensor is dense, with the same dtype and shape on all ranks. Collective."""
        return self._as_tensor(self._call("sum", tensor.detach()))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked in rank order: shape [world, ...]. Collective."""
        return self._as_tensor(self._call("all_gather", tensor.detach()))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """A copy of rank `root`'s tensor. Collective."""
        return self._as_tensor(self._call("broadcast", tensor.detach(), root))

    def barrier(self) -> None:
        """Waits until all ranks have called it. Collective."""
        self._call("barrier")

    def validation(self, loss: float) -> None:
        """Writes a validation row to metrics.jsonl. Pass the same loss on all ranks (see `mean()`). Not collective."""
        self._call("validation", float(loss))

    def evaluation(self) -> Scope:
        """A scope for evaluation: `with engine.evaluation():`. Disables gradients, saves and restores the random
        state of training, and gives the model's buffers the values that `train.buffers` declares. Scopes can be
        nested. Call `model.eval()` and `model.train()` yourself. Collective."""

        def begin() -> Any:
            self._list_again()
            return self._native.evaluation()

        return Scope(begin)

    def swap(self, values: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor | None]) -> Scope:
        """A scope in which the model has other weights, such as averages: `with engine.swap(averages):`. Afterwards
        weights, masters and optimizer states are as before, bit for bit. Collective.

        Args:
            values: tensors by parameter name, in full shape, the same on all ranks; or a function that returns one,
                called once per parameter in the order of `parameters()`. A parameter without a tensor (None) keeps
                its values.
        """
        if isinstance(values, Mapping):
            unknown = [name for name in values if name not in {info.name for info in self.parameters()}]
            if unknown:
                raise UserError(f"engine.swap(values): the model has no parameter '{unknown[0]}'")
            read: Callable[[str], torch.Tensor | None] = dict(values).get
        else:
            read = values
        mailbox = classes().Mailbox()

        def run(parameter: bytes) -> None:
            tensor = read(parameter.decode())
            if tensor is not None:
                mailbox.put(tensor.detach())

        pointer = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p)(callbacks.guard_code(run))
        native = self._native
        return Scope(lambda: native.swap(_address(pointer), mailbox))

    def loader(self, dataset: Any, **options: Any) -> Iterator[Any]:
        """See `zeroth.loader`."""
        return loader(self, dataset, **options)

    def generator(self, key: int) -> torch.Generator:
        """A new CPU generator for the program's own random numbers, seeded by `train.seed` and `key`: the same key
        gives the same numbers in every run and on every rank. Choose the key as the data, such as the index of the
        sample."""
        generator = self._call("generator", key)
        assert isinstance(generator, torch.Generator)
        return generator

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters in the forward pass (`train.dtype`). Convert floating-point inputs to it."""
        return {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}[self._call("dtype")]

    @property
    def device(self) -> torch.device:
        """The device that the model computes on (`job.device`). Move inputs to it."""
        return torch.device(self._call("device"))

    @property
    def rank(self) -> int:
        """0 to world - 1."""
        return int(self._call("rank"))

    @property
    def world(self) -> int:
        """Number of ranks that train this model."""
        return int(self._call("world"))

    @property
    def accumulation(self) -> int:
        """Micro-batches per rank and step."""
        return int(self._call("accumulation"))

    @property
    def micro_batch(self) -> int:
        """Samples per micro-batch (`train.micro_batch`)."""
        return int(self._call("micro_batch"))

    @property
    def steps(self) -> int:
        """Number of steps of the run (`train.steps`)."""
        return int(self._call("steps"))

    @property
    def step_index(self) -> int:
        """Number of finished steps."""
        return int(self._call("step_index"))

    @property
    def micro_index(self) -> int:
        """Index of the next micro-batch within its step, 0 to world * accumulation - 1, different on each rank. Choose
        the data from `seed`, `step_index` and this index: then a resumed run reads the same data."""
        return int(self._call("micro_index"))

    @property
    def seed(self) -> int:
        """`train.seed`."""
        return int(self._call("seed"))

    @property
    def samples(self) -> int:
        """Number of samples of all ranks in all finished steps, also of resumed ones."""
        return int(self._call("samples"))

    @property
    def done(self) -> bool:
        """All steps are finished, or a signal stopped the run (`checkpoint.on_signal`)."""
        return bool(self._call("done"))

    @property
    def validation_due(self) -> bool:
        """After every `eval.every` steps and after the last step."""
        return bool(self._call("validation_due"))

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step with `train.dtype = "fp16"`, otherwise 1. `backward()` applies it."""
        return float(self._call("loss_scale"))

    @staticmethod
    def _as_tensor(value: Any) -> torch.Tensor:
        assert isinstance(value, torch.Tensor)
        return value


def _address(pointer: Any) -> int:
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


def _checked(kind: str) -> str:
    if kind not in ("value", "gradient", "state"):
        raise UserError(f"the kind of a tensor is {kind!r}, but must be 'value', 'gradient' or 'state'")
    return kind


def _end() -> None:
    if _engines and getattr(sys, "last_exc", None) is not None:
        report_failure()
    _close_all()


atexit.register(_end)
