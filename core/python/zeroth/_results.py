"""What methods of the engine return."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step; the same on all ranks."""

    step: int
    """Number of finished steps."""
    skipped: bool
    """Gradients were not finite, so the weights were not updated."""
    loss: float
    """Mean over ranks and micro-batches, or the sum over these (`gradients.divisor`)."""
    gradient_norm: float
    """Global norm before clipping; infinite or NaN if gradients were not finite."""
    learning_rate: float
    """For parameters outside groups."""
    loss_scale: float
    """Of the next step."""


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The result of `engine.load()`: the checkpoint's folder, and the names of tensors that were not loaded."""

    folder: str
    missing: list[str]
    """In the model, not in the checkpoint."""
    unexpected: list[str]
    """In the checkpoint, not in the model."""
    other_shape: list[str]
    """In both, with different shapes."""
    fresh: list[str]
    """Optimizer states that the checkpoint does not have: they are reset."""
    dropped: list[str]
    """Optimizer states that only the checkpoint has: they are ignored."""


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """A parameter of the model, as `engine.parameters()` lists it."""

    name: str
    """The first name of a parameter that has several."""
    shape: tuple[int, ...]
    trained: bool
    """False: `requires_grad` was false when the engine was made or refreshed."""
    group: int
    """0: in no group; otherwise 1 + the index in `engine.groups()`."""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Memory of this rank, in bytes: what the engine has allocated, and the activations of torch."""

    tier: str
    """"device", "host" or "disk"."""
    kind: str
    """"weights", "gradients", "master", "optimizer", "activations", ..."""
    planned: int
    """In the plan that the engine prints when it begins; 0: not planned."""
    now: int
    """Allocated now."""
    peak: int
    """The most since the engine was made."""


@dataclasses.dataclass(frozen=True)
class GroupInfo:
    """A group of parameters, [[optimizer.groups]]."""

    match: list[str]
    """Patterns of parameter names."""
    lr_scale: float
    """Factor of the learning rate."""
    values: dict[str, str]
    """Keys that the group sets, with their TOML values."""
    use: str
    """The group's optimizer; empty: the job's."""
