"""torch.compile on sharded parameters: kernels of inductor read their inputs by pointer, so these are gathered around
them.

The other backends run operators, which the engine sees. What a compiled region gets is a list of tensors, among them
the parameters that it uses, and in backward views of them: all have the storage of the parameter."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ._scopes import gather

_MODULE = "torch._inductor.output_code"
_plain: Any = None
_models: weakref.WeakKeyDictionary[Any, _Storages] = weakref.WeakKeyDictionary()


class _Storages:
    """The parameters of a model by the address of their storage."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = {parameter.untyped_storage()._cdata: parameter for parameter in parameters}
        self.bytes = sum(parameter.nbytes for parameter in self.parameters.values())
        self.warned = False


def note_parameters(owner: Any, parameters: Sequence[torch.Tensor]) -> None:
    """Sets the parameters of the model of `owner`, an engine, which forgets them when it ends."""
    _models[owner] = _Storages(parameters)


def forget(owner: Any) -> None:
    """The engine has ended."""
    _models.pop(owner, None)


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _run(graph: Any, inputs: Sequence[Any]) -> Any:
    needed: dict[int, torch.Tensor] = {}
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()._cdata
            for model in _models.values():
                parameter = model.parameters.get(storage)
                if parameter is not None and not _has_memory(parameter):
                    needed[storage] = parameter
    if not needed:
        return _plain(graph, inputs)
    for model in _models.values():
        size = sum(parameter.nbytes for storage, parameter in needed.items() if storage in model.parameters)
        if 2 * size > model.bytes and len(model.parameters) > 2 and not model.warned:
            model.warned = True
            warnings.warn(
                f"zeroth: a compiled region uses {size} of the {model.bytes} bytes of the model's parameters, so each "
                "rank holds them while it runs; compile blocks instead: for block in blocks: block.compile()",
                stacklevel=2,
            )
    with gather(list(needed.values())):
        return _plain(graph, inputs)


def _patch(module: types.ModuleType) -> None:
    global _plain
    if _plain is None:
        _plain = module.CompiledFxGraph.__call__
        module.CompiledFxGraph.__call__ = _run


class _Finder(importlib.abc.MetaPathFinder):
    """Patches the module when torch imports it, at the first compilation."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                _patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def watch(watch: bool) -> None:
    """Begins, or ends, to gather sharded parameters around the kernels of inductor."""
    global _plain
    module = sys.modules.get(_MODULE)
    if watch:
        if module is not None:
            _patch(module)
        elif _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        return
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if _plain is not None and module is not None:
        module.CompiledFxGraph.__call__ = _plain
        _plain = None
