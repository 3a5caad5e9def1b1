"""Global batches: the samples of all ranks in each step, the same on any number of ranks.

An epoch has one order of samples, the same on all ranks. Batch k of all ranks together is samples k x G to (k + 1) x G
of it, and rank r takes every W-th of them, as DistributedSampler does. A position in the epoch therefore means the same
for 1, 2 and 4 ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ebbtide.random_state import mix_seed, seeded_random

logger = logging.getLogger(__name__)

_LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)


@dataclass(frozen=True)
class BatchDivision:
    """A rank's share of a global batch: `accumulate` forward passes of `micro_batch` samples per step."""

    micro_batch: int
    accumulate: int


def divide_global_batch(global_batch: int, *, world_size: int, micro_batch_max: int) -> BatchDivision:
    """Return the division with the largest micro-batch, so with the fewest forward passes.

    Args:
        global_batch: samples of all ranks per step.
        micro_batch_max: most samples in one forward pass, as the script sets it.

    Raises:
        ValueError: the ranks cannot have equal shares.
    """
    if global_batch % world_size:
        raise ValueError(
            f"The global batch of {global_batch} samples cannot be divided among {world_size} ranks. "
            "Limit `gpus` of the job to numbers that divide it, or pass another `global_batch` at the first start."
        )
    share = global_batch // world_size
    micro_batch = next(size for size in range(min(share, micro_batch_max), 0, -1) if share % size == 0)
    return BatchDivision(micro_batch, share // micro_batch)


class GlobalSampler(Sampler[int]):
    """The samples of all ranks in one order per epoch, in whole global batches.

    The order depends on the seed and the epoch only. The last global batch of an epoch is completed with the first
    samples, as DistributedSampler does, or left out.

    Args:
        sampler: the script's sampler, whose order is taken. A DistributedSampler is taken as the order of all ranks.
        seed: seed of samplers that have none of their own.

    Raises:
        ValueError: the sampler divides samples among ranks in a way of its own.
    """

    def __init__(self, sampler: Sampler[int], *, global_batch: int, seed: int, drop_last: bool) -> None:
        # A subclass may have an order of its own, so the exact type counts.
        if type(sampler) is not DistributedSampler and hasattr(sampler, "num_replicas"):
            raise ValueError(
                f"The training loader has the sampler {type(sampler).__name__}, which divides samples among ranks "
                "itself. Use torch.utils.data.DistributedSampler, or a sampler that yields the samples of all ranks."
            )
        self.sampler = sampler
        self.global_batch = global_batch
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def iterate_batches(self, start: int = 0) -> Iterator[list[int]]:
        """Yield the global batches of the epoch after its first `start` samples."""
        order = self._read_order()
        for first in range(start, len(order), self.global_batch):
            batch = _list_numbers(order[first : first + self.global_batch])
            if (missing := self.global_batch - len(batch)) and self.drop_last:
                return
            repeats, rest = divmod(missing, len(order))
            yield batch + (_list_numbers(order) * repeats if repeats else []) + _list_numbers(order[:rest])

    def count_batches(self, start: int = 0) -> int:
        """Return the number of global batches after the first `start` samples of the epoch."""
        left = max(0, self._count_samples() - start)
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def list_samples(self) -> list[int]:
        """Return the samples of the epoch in order."""
        return [sample for batch in self.iterate_batches() for sample in batch]

    def __iter__(self) -> Iterator[int]:
        return iter(self.list_samples())

    def __len__(self) -> int:
        return self.count_batches() * self.global_batch

    def _count_samples(self) -> int:
        counted: Any = self.sampler.dataset if type(self.sampler) is DistributedSampler else self.sampler
        return len(counted)

    def _read_order(self) -> Sequence[int] | torch.Tensor:
        sampler = self.sampler
        if type(sampler) is DistributedSampler:
            count = self._count_samples()
            return self._permute(count, sampler.seed) if sampler.shuffle else range(count)
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        if type(sampler) is RandomSampler and not sampler.replacement:
            count = len(sampler.data_source)
            if sampler.num_samples == count:
                return self._permute(count, self.seed)
        return self._read_order_of_another(sampler)

    def _read_order_of_another(self, sampler: Any) -> list[int]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        if hasattr(sampler, "initial_seed"):
            sampler.initial_seed = self.seed  # Accelerate's, which adds the epoch
        # Samplers draw from the generators of the process, unless they have their own.
        seed = self._mix_epoch(self.seed)
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        with seeded_random(seed):
            return list(sampler)

    def _permute(self, count: int, seed: int) -> torch.Tensor:
        # As DistributedSampler does it, so that its order is kept.
        return torch.randperm(count, generator=torch.Generator().manual_seed(self._mix_epoch(seed)))

    def _mix_epoch(self, seed: int) -> int:
        return (seed + self.epoch) % 2**63


def _list_numbers(order: Sequence[int] | torch.Tensor) -> list[int]:
    numbers: list[int] = order.tolist() if isinstance(order, torch.Tensor) else list(order)
    return numbers


class RankBatchSampler(Sampler[list[int]]):
    """This rank's micro-batches of an epoch, from a position on.

    Every global batch is divided among all ranks and forward passes. So its samples are the same on any number of
    ranks.
    """

    def __init__(self, sampler: GlobalSampler, division: BatchDivision, *, rank: int, world_size: int) -> None:
        self.sampler = sampler
        self.division = division
        self.batch_size = division.micro_batch
        self.drop_last = sampler.drop_last
        self._rank = rank
        self._world_size = world_size
        self._start = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.sampler.set_epoch(epoch)

    def skip_samples(self, samples: int) -> None:
        """Begin the next pass after its first `samples` samples on all ranks. Later passes begin at their start."""
        self._start = samples

    def skip_steps(self, steps: int) -> None:
        """Begin the next pass after its first `steps` steps. Later passes begin at their start."""
        self.skip_samples(steps * self.sampler.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: a pass counts as begun although a loop may take none of its batches.
        start, self._start = self._start, 0
        return self._iterate(start)

    def _iterate(self, start: int) -> Iterator[list[int]]:
        size = self.division.micro_batch
        for batch in self.sampler.iterate_batches(start):
            share = batch[self._rank :: self._world_size]
            for first in range(0, self.division.accumulate * size, size):
                yield share[first : first + size]

    def __len__(self) -> int:
        return self.sampler.count_batches() * self.division.accumulate


def find_sampler(loader: DataLoader[Any]) -> Sampler[int]:
    """Return the sampler of a loader, also of one whose batches a framework has divided among ranks.

    Raises:
        ValueError: its samples have no positions, or batches of its own design.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"The training loader reads {type(loader.dataset).__name__}, an IterableDataset, whose samples have no "
            "positions to continue from. Use a dataset with `__getitem__` and `__len__`."
        )
    batches = _find_batch_sampler(loader)
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"The training loader has batch_size={loader.batch_size} and the batch sampler {type(batches).__name__}. "
            "Give the DataLoader a `batch_size` and no `batch_sampler`, so that batches can be divided among ranks."
        )
    sampler: Any = batches.sampler
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # of a wrapper that Lightning adds
    return inner if isinstance(sampler, DistributedSampler) and isinstance(inner, Sampler) else sampler


def read_batch_size(loader: DataLoader[Any]) -> int:
    """Return the samples per rank in one forward pass, as the script set it."""
    return int(_find_batch_sampler(loader).batch_size)


def _find_batch_sampler(loader: DataLoader[Any]) -> Any:
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches


class PositionedLoader(DataLoader[Any]):
    """A loader whose position its integration restores. Frameworks that ask for a state find an empty one."""

    @classmethod
    def replace(cls, loader: DataLoader[Any], batches: RankBatchSampler) -> PositionedLoader:
        """Return a loader like `loader` with other batches."""
        options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
        return cls(loader.dataset, batch_sampler=batches, **options)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, "the integration restores the position"


class BatchSource:
    """The batches of this rank from the loader of a plain loop, by epoch and global sample position.

    Args:
        global_batch: samples per batch on all ranks together.

    Raises:
        ValueError: there are fewer samples than ranks in a batch, or the loader cannot be divided.
    """

    def __init__(self, loader: DataLoader[Any], *, global_batch: int, rank: int, world_size: int, seed: int) -> None:
        if global_batch < world_size:
            raise ValueError(
                f"The global batch has {global_batch} samples, but there are {world_size} ranks. "
                f"Set `gpus.max` of the job to {global_batch} or less, or start anew with a larger `global_batch`."
            )
        if global_batch % world_size:
            logger.warning(
                "The global batch of %d samples cannot be divided evenly between %d ranks. Samples on the ranks with "
                "fewer of them count slightly more in the averaged gradients.",
                global_batch,
                world_size,
            )
        self._order = GlobalSampler(
            find_sampler(loader), global_batch=global_batch, seed=seed, drop_last=loader.drop_last
        )
        division = BatchDivision(-(-global_batch // world_size), 1)
        self._batches = RankBatchSampler(self._order, division, rank=rank, world_size=world_size)
        self._loader = PositionedLoader.replace(loader, self._batches)
        self._seed, self._rank = seed, rank

    def count_batches(self, start: int) -> int:
        """Return the number of batches that are left in an epoch after its first `start` samples."""
        return self._order.count_batches(start)

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Any, int]]:
        """Yield each batch with the position in the epoch after it."""
        self._batches.set_epoch(epoch)
        self._batches.skip_samples(start)
        # The iterator draws a seed for its workers. That must not disturb the training's own random numbers.
        with seeded_random(mix_seed(self._seed, epoch, start, self._rank)):
            iterator = iter(self._loader)
        for number, batch in enumerate(iterator, start=1):
            yield batch, start + number * self._order.global_batch
