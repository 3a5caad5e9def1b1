"""Batches by global position: which samples each rank gets, whatever the number of ranks.

An epoch has one order of samples, the same on all ranks. Batch k of all ranks together is samples k x G to (k + 1) x G
of it, and rank r takes every W-th of them. A position in the epoch therefore means the same for 1, 2 and 4 ranks.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

logger = logging.getLogger(__name__)

_SEED_BITS = 63
_WEYL_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring positions get distant seeds


def mix_seed(seed: int, *numbers: int) -> int:
    """Return a seed that depends on all arguments (splitmix64), the same on every machine."""
    state = seed & (2**64 - 1)
    for number in numbers:
        state = (state + (number + 1) * _WEYL_STEP) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> (64 - _SEED_BITS)


@contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Seed the generators of torch, of Python and of NumPy, if it is loaded. Restore them at the end.

    The generator of this rank's GPU is one of them once the process uses the GPU.
    """
    torch_generator, numpy_random = torch.default_generator, getattr(sys.modules.get("numpy"), "random", None)
    before = torch_generator.get_state(), random.getstate()
    numpy_before = None if numpy_random is None else numpy_random.get_state()
    is_gpu_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu_before = torch.cuda.get_rng_state() if is_gpu_used else None
    torch_generator.manual_seed(seed)
    random.seed(seed)
    if gpu_before is not None:
        torch.cuda.manual_seed(seed)
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch_generator.set_state(before[0])
        random.setstate(before[1])
        if gpu_before is not None:
            torch.cuda.set_rng_state(gpu_before)
        if numpy_random is not None:
            numpy_random.set_state(numpy_before)


class SampleOrder:
    """The order of the samples in each epoch, as the sampler of the user's loader defines it.

    Args:
        sampler: the sampler of the loader.
        seed: seed of samplers that have none of their own.

    Raises:
        ValueError: the sampler divides samples between ranks in a way of its own.
    """

    def __init__(self, sampler: Any, *, seed: int) -> None:
        # A subclass may have an order of its own, so the exact types count.
        if type(sampler) is not DistributedSampler and hasattr(sampler, "num_replicas"):
            raise ValueError(
                f"`dataloader` has the sampler {type(sampler).__name__}, which divides samples between ranks itself. "
                "Use torch.utils.data.DistributedSampler, or a sampler that yields the samples of all ranks."
            )
        self._sampler = sampler
        self._seed = seed

    def list_samples(self, epoch: int) -> Sequence[int] | torch.Tensor:
        """Return the indices of an epoch's samples in order."""
        sampler = self._sampler
        if type(sampler) is DistributedSampler:
            count = _count_samples(sampler.dataset)
            return self._permute(count, sampler.seed + epoch) if sampler.shuffle else range(count)
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        seed = mix_seed(self._seed, epoch)
        if type(sampler) is RandomSampler and not sampler.replacement:
            count = len(sampler.data_source)
            if sampler.num_samples == count:
                return self._permute(count, seed)
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        with seeded_random(seed):
            return list(sampler)

    def _permute(self, count: int, seed: int) -> torch.Tensor:
        # As DistributedSampler does it, so that its order is kept.
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _count_samples(dataset: Any) -> int:
    return len(dataset)


class RankBatches(Sampler[list[int]]):
    """This rank's share of the batches of one epoch, from a position on.

    Args:
        global_batch: samples of one batch on all ranks together.
        drop_last: leave out the last batch of an epoch if it is smaller.
    """

    def __init__(self, order: SampleOrder, *, global_batch: int, rank: int, world_size: int, drop_last: bool) -> None:
        self._order = order
        self.global_batch = global_batch
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last
        self._samples: Sequence[int] | torch.Tensor = ()
        self._start = 0

    @property
    def sample_count(self) -> int:
        """Number of samples that the present epoch uses on all ranks together."""
        count = len(self._samples)
        return count - count % self.global_batch if self._drop_last else count

    def seek(self, epoch: int, start: int) -> None:
        """Continue in `epoch` after its first `start` samples."""
        self._samples = self._order.list_samples(epoch)
        self._start = start

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self._start, self.sample_count, self.global_batch):
            batch = self._samples[start : start + self.global_batch]
            own = batch[self._rank :: self._world_size]
            if len(own) == 0:
                # The last batch has fewer samples than there are ranks, and every rank needs one.
                own = batch[self._rank % len(batch) :][:1]
            yield own.tolist() if isinstance(own, torch.Tensor) else list(own)

    def __len__(self) -> int:
        return -(-max(0, self.sample_count - self._start) // self.global_batch)


def check_loader(loader: DataLoader[Any]) -> None:
    """Check that the samples of a loader have global positions.

    Raises:
        ValueError: they have none; the message says what to do.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"`dataloader` reads {type(loader.dataset).__name__}, an IterableDataset, whose samples have no positions. "
            "Use a map-style dataset, or leave `dataloader` out and draw batches with `run.reproducible`."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"`dataloader` has batch_size={loader.batch_size} and batch sampler {type(loader.batch_sampler).__name__}. "
            "Give the DataLoader a `batch_size` and no `batch_sampler`, so that batches can be divided anew."
        )


def rebuild_loader(loader: DataLoader[Any], batches: RankBatches) -> DataLoader[Any]:
    """Return a loader with the options of `loader` that loads `batches`."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class BatchSource:
    """The batches of this rank from the user's loader, by epoch and global sample position.

    Args:
        global_batch: samples per batch on all ranks together.
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
        order = SampleOrder(loader.sampler, seed=seed)
        self._batches = RankBatches(
            order, global_batch=global_batch, rank=rank, world_size=world_size, drop_last=loader.drop_last
        )
        self._loader = rebuild_loader(loader, self._batches)
        self._seed, self._rank = seed, rank

    def count_batches(self, epoch: int, start: int) -> int:
        """Return the number of batches that are left in `epoch` after its first `start` samples."""
        self._batches.seek(epoch, start)
        return len(self._batches)

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Any, int]]:
        """Yield each batch with the position in the epoch after it."""
        self._batches.seek(epoch, start)
        sample_count = self._batches.sample_count
        # The iterator draws a seed for its workers. That must not disturb the training's own random numbers.
        with seeded_random(mix_seed(self._seed, epoch, start, self._rank)):
            iterator = iter(self._loader)
        for position in range(start, sample_count, self._batches.global_batch):
            yield next(iterator), min(position + self._batches.global_batch, sample_count)


class PositionedSampler:
    """A function that draws random training data, called so that its result depends on the global position alone.

    The n-th call on rank r of W draws batch number `base + n x W + r`. Calls while the model is in evaluation mode are
    numbered separately in each step and are the same on all ranks.
    """

    def __init__(self, draw: Callable[..., Any], *, seed: int, rank: int, world_size: int) -> None:
        self._draw = draw
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._base = self._calls = self._early_calls = self._evaluations = self._step = 0

    def resume(self, base: int) -> None:
        """Continue after `base` batches of all ranks."""
        self._base = base

    def begin_steps(self) -> None:
        """Note the calls before the first step: their batches belong to steps that follow."""
        self._early_calls = self._calls

    def begin_step(self, step: int) -> None:
        self._step, self._evaluations = step, 0

    @property
    def position(self) -> int:
        """Number of batches that finished steps of all ranks have used."""
        return self._base + (self._calls - self._early_calls) * self._world_size

    def draw(self, *arguments: Any, is_training: bool, **keywords: Any) -> Any:
        if is_training:
            number = self._base + self._calls * self._world_size + self._rank
            self._calls += 1
            seed = mix_seed(self._seed, number)
        else:
            seed = mix_seed(self._seed, -2, self._step, self._evaluations)
            self._evaluations += 1
        with seeded_random(seed):
            return self._draw(*arguments, **keywords)
