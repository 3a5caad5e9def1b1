"""The global batch, which stays the same on any number of ranks, and its samples in global order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler


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
    """

    def __init__(self, sampler: Sampler[int], *, global_batch: int, seed: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.global_batch = global_batch
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def list_samples(self) -> list[int]:
        """Return the samples of the epoch in order."""
        samples = self._read_order()
        if remainder := len(samples) % self.global_batch:
            if self.drop_last:
                return samples[:-remainder]
            missing = self.global_batch - remainder
            repeats = -(-missing // len(samples))
            samples += (samples * repeats)[:missing]
        return samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.list_samples())

    def __len__(self) -> int:
        count = self._count_samples()
        batches = count // self.global_batch if self.drop_last else -(-count // self.global_batch)
        return batches * self.global_batch

    def _count_samples(self) -> int:
        counted: Any = self.sampler.dataset if isinstance(self.sampler, DistributedSampler) else self.sampler
        return len(counted)

    def _read_order(self) -> list[int]:
        sampler, count = self.sampler, self._count_samples()
        if isinstance(sampler, DistributedSampler):
            return self._permute(count, sampler.seed) if sampler.shuffle else list(range(count))
        if isinstance(sampler, RandomSampler) and not sampler.replacement and count == len(sampler.data_source):
            return self._permute(count, self.seed)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        # Samplers draw from the generator of the process, unless they have their own.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + self.epoch)
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                generator.manual_seed(self.seed + self.epoch)
            return list(sampler)

    def _permute(self, count: int, seed: int) -> list[int]:
        order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed + self.epoch)).tolist()
        return order


class RankBatchSampler(Sampler[list[int]]):
    """This rank's micro-batches of an epoch, from a position on.

    Every global batch is cut into one slice per rank and forward pass. So its samples are the same on any number of
    ranks.
    """

    def __init__(self, sampler: GlobalSampler, division: BatchDivision, *, rank: int, world_size: int) -> None:
        self.sampler = sampler
        self.division = division
        self.batch_size = division.micro_batch
        self.drop_last = sampler.drop_last
        self._rank = rank
        self._world_size = world_size
        self._start_step = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.sampler.set_epoch(epoch)

    def skip_steps(self, steps: int) -> None:
        """Begin the next pass after its first `steps` steps. Later passes begin at their start."""
        self._start_step = steps

    def __iter__(self) -> Iterator[list[int]]:
        samples = self.sampler.list_samples()
        start, self._start_step = self._start_step * self.sampler.global_batch, 0
        for step_start in range(start, len(samples), self.sampler.global_batch):
            yield from self._slice(samples[step_start : step_start + self.sampler.global_batch])

    def __len__(self) -> int:
        return len(self.sampler) // self.sampler.global_batch * self.division.accumulate

    def _slice(self, batch: Sequence[int]) -> Iterator[list[int]]:
        size = self.division.micro_batch
        for number in range(self.division.accumulate):
            start = (number * self._world_size + self._rank) * size
            yield list(batch[start : start + size])


def find_sampler(loader: DataLoader[Any]) -> Sampler[int]:
    """Return the sampler of a loader, also of one whose batches a framework has divided among ranks.

    Raises:
        ValueError: its samples have no positions, or it has no batch size.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"The training loader reads {type(loader.dataset).__name__}, an IterableDataset, whose samples have no "
            "positions to continue from. Use a dataset with `__getitem__` and `__len__`."
        )
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if batches is None or not getattr(batches, "batch_size", None) or not hasattr(batches, "sampler"):
        raise ValueError("The training loader has no `batch_size`. Set it, so that batches can be divided among ranks.")
    sampler: Sampler[int] = batches.sampler
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # of a wrapper that Lightning adds
    return inner if isinstance(sampler, DistributedSampler) and isinstance(inner, Sampler) else sampler


def read_batch_size(loader: DataLoader[Any]) -> int:
    """Return the samples per rank in one forward pass, as the script set it."""
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return int(batches.batch_size)


class PositionedLoader(DataLoader[Any]):
    """A loader whose position its integration restores. Frameworks that ask for a state find an empty one."""

    @classmethod
    def replace(cls, loader: DataLoader[Any], batches: RankBatchSampler) -> PositionedLoader:
        """Return a loader like `loader` with other batches."""
        names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
        options = {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")}
        return cls(loader.dataset, batch_sampler=batches, **options)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, "the integration restores the position"
