"""Text of sharded parameters: `repr` of a tensor reads its values, which other ranks would have to send."""

from __future__ import annotations

from typing import Any

import torch

_plain: Any = None


def _is_sharded(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        return "zeroth.gather(" in str(error)
    return False


def _text(tensor: Any, **options: Any) -> str:
    if isinstance(tensor, torch.Tensor) and options.get("tensor_contents") is None and _is_sharded(tensor):
        return (
            f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype}, in shards; its values: "
            "zeroth.gather(parameter), or engine.get(name))"
        )
    return str(_plain(tensor, **options))


def watch(watch: bool) -> None:
    """Begins, or ends, to print a sharded parameter without its values. Other tensors are printed as always."""
    global _plain
    module = torch._tensor_str
    if watch and _plain is None:
        _plain, module._str = module._str, _text  # type: ignore[assignment]
    elif not watch and _plain is not None:
        module._str, _plain = _plain, None
