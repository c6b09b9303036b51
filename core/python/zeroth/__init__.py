"""Zeroth: ZeRO for any torch.nn.Module, as plug-ins behind a stable C ABI, chosen in a TOML file.

    import zeroth

    engine = zeroth.Engine(model, "job.toml", {"train.steps": 500})
    for batch in engine.loader(dataset, collate_fn=collate):
        loss = model(**batch).loss
        engine.backward(loss, weight=batch["labels"].ne(-100).sum())
        engine.step()
    engine.save("checkpoints")

Importing it loads no library, compiles nothing and touches no device.
"""

from ._engine import Engine
from ._errors import EnvironmentError, Error, InternalError, PeerFailedError, PeerLostError, UserError
from ._loader import MicroBatchSampler
from ._program import Key, Program, Rendezvous, report_failure
from ._results import GroupInfo, LoadReport, MemoryUse, ParameterInfo, StepResult
from ._scopes import checkpoint, deferred, gather

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EnvironmentError",
    "Error",
    "GroupInfo",
    "InternalError",
    "Key",
    "LoadReport",
    "MemoryUse",
    "MicroBatchSampler",
    "ParameterInfo",
    "PeerFailedError",
    "PeerLostError",
    "Program",
    "Rendezvous",
    "StepResult",
    "UserError",
    "checkpoint",
    "deferred",
    "gather",
    "report_failure",
]
