"""The parameters and buffers that a module has at the time."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ._errors import UserError

Listed = tuple[list[str], list[torch.Tensor], list[str], list[torch.Tensor]]


class ModelTensors:
    """The named tensors of a module, listed again only when its modules, parameters or buffers have changed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._tables: list[dict[str, Any]] = []
        self._state: tuple[list[str], list[int]] = ([], [])

    def tensors(self) -> Listed:
        """Every name of every parameter and buffer, tied ones under each of their names, in the module's order."""
        self._tables = [
            table
            for module in self._module.modules()
            for table in (module._modules, module._parameters, module._buffers)
        ]
        self._state = self._current()
        parameters = [*self._module.named_parameters(remove_duplicate=False)]
        buffers = [*self._module.named_buffers(remove_duplicate=False)]
        for name, parameter in parameters:
            if torch.nn.parameter.is_lazy(parameter):
                raise UserError(
                    f"zeroth.Engine: the parameter '{name}' of a lazy module has no shape yet; call the model once "
                    "before the engine is made"
                )
        return [n for n, _ in parameters], [p for _, p in parameters], [n for n, _ in buffers], [b for _, b in buffers]

    def changed(self) -> bool:
        """Whether tensors() would return something else than the last time. About 0.1 us per module."""
        return self._current() != self._state

    def _current(self) -> tuple[list[str], list[int]]:
        names = list(itertools.chain.from_iterable(self._tables))
        return names, list(map(id, itertools.chain.from_iterable(map(dict.values, self._tables))))
