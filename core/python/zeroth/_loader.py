"""The data of a run: this rank's micro-batches, chosen by the seed and the number of samples before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ._errors import UserError

if TYPE_CHECKING:
    from ._engine import Engine


class MicroBatchSampler(Sampler[list[int]]):
    """Distributes shuffled epochs of a dataset over the micro-batches of all ranks; a `batch_sampler` for a DataLoader.

    The samples of a step depend only on `engine.seed`, the size of the dataset and the number of samples before the
    step: they are the same for any number of ranks and accumulation with the same global batch, and a resumed run
    continues with the samples that the saved one would have read. Epochs follow each other without end. The same
    samples as `zr::MicroBatchSampler` of C++.

    Args:
        engine: says where the run is when an iteration begins.
        size: number of samples of the dataset.
        shuffle: False: in the order of the dataset.

    Raises:
        UserError: the dataset is empty.
    """

    def __init__(self, engine: Engine, size: int, shuffle: bool = True) -> None:
        if size <= 0:
            raise UserError("engine.loader(dataset): the dataset is empty")
        self._engine, self._size, self._shuffle = engine, size, shuffle

    def __iter__(self) -> Iterator[list[int]]:
        engine, size = self._engine, self._size
        first, batch, ranks, rank = engine.samples, engine.micro_batch, engine.world, engine.rank
        micro, seed, accumulation = engine.micro_index // ranks, engine.seed, engine.accumulation
        orders: dict[int, list[int]] = {}
        while True:
            step, index = divmod(micro, accumulation)
            start = first + (step * accumulation * ranks + index * ranks + rank) * batch
            samples = []
            for at in range(start, start + batch):
                epoch, place = divmod(at, size)
                if epoch not in orders:
                    orders = {e: o for e, o in orders.items() if e >= epoch - 1}
                    orders[epoch] = self._order(seed, epoch)
                samples.append(orders[epoch][place])
            yield samples
            micro += 1

    def _order(self, seed: int, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        generator = torch.Generator().manual_seed(_signed(seed * 0x9E3779B97F4A7C15 + epoch))
        return torch.randperm(self._size, generator=generator).tolist()


def _signed(value: int) -> int:
    """The bits of an unsigned 64-bit number as the signed one that torch takes."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def loader(
    engine: Engine,
    dataset: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    shuffle: bool = True,
    num_workers: int = 0,
    **options: Any,
) -> Iterator[Any]:
    """This rank's micro-batches until `engine.done`: `for batch in engine.loader(dataset): ...`.

    The same samples in the same order for every number of ranks, and after a resume; see MicroBatchSampler. Call
    `engine.backward()` and `engine.step()` once per batch. After `engine.load()` or `set_accumulation()` inside the
    loop, the next batch is the one that belongs there; batches that workers have prepared for another place are
    dropped.

    Args:
        engine: the engine.
        dataset: has `__len__` and `__getitem__`.
        collate_fn: makes a batch of a list of samples; by default that of torch.
        shuffle: False: in the order of the dataset.
        num_workers: processes that prepare batches. 0: this one.
        options: further ones of torch.utils.data.DataLoader, but none that choose samples.

    Raises:
        UserError: the dataset is empty, has no length, or an option chooses samples.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UserError(
            "engine.loader(dataset): the dataset has no length and no samples by index, so a resumed run could not "
            "find its place; use a dataset with __len__ and __getitem__, or loop over your own loader and choose its "
            "data by engine.step_index and engine.micro_index"
        )
    wrong = sorted({"batch_size", "sampler", "batch_sampler", "drop_last", "generator"} & options.keys())
    if wrong:
        raise UserError(
            f"engine.loader(dataset, {wrong[0]}=...): the engine chooses the samples; set train.micro_batch and "
            "train.seed in the configuration"
        )
    return _batches(
        engine,
        DataLoader(
            dataset,
            batch_sampler=MicroBatchSampler(engine, len(dataset), shuffle),
            collate_fn=collate_fn,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(_signed(engine.seed)),  # draws none of the model's numbers
            **options,
        ),
    )


def _batches(engine: Engine, batches: DataLoader[Any]) -> Iterator[Any]:
    iterator: Iterator[Any] | None = None
    expected: tuple[int, int, int] | None = None
    while not engine.done:
        accumulation, micro = engine.accumulation, engine.micro_index // engine.world
        now = (engine.step_index, micro, accumulation)
        if iterator is None or now != expected:
            iterator = iter(batches)
        step, micro = (now[0], micro + 1) if micro + 1 < accumulation else (now[0] + 1, 0)
        expected = (step, micro, accumulation)
        yield next(iterator)
