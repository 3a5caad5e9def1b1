"""The global batch and its samples are the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from ebbtide.global_batches import (
    BatchDivision,
    GlobalSampler,
    PositionedLoader,
    RankBatchSampler,
    divide_global_batch,
    find_sampler,
    read_batch_size,
)

GLOBAL_BATCH = 16
SAMPLES = range(50)
DATASET = TensorDataset(torch.arange(50))


@pytest.mark.parametrize(
    ("world_size", "micro_batch_max", "division"),
    [
        (1, 16, BatchDivision(16, 1)),
        (1, 8, BatchDivision(8, 2)),
        (2, 8, BatchDivision(8, 1)),
        (4, 8, BatchDivision(4, 1)),
        (1, 6, BatchDivision(4, 4)),
        (16, 8, BatchDivision(1, 1)),
    ],
)
def test_ranks_divide_a_batch_with_the_fewest_forward_passes(
    world_size: int, micro_batch_max: int, division: BatchDivision
) -> None:
    assert divide_global_batch(GLOBAL_BATCH, world_size=world_size, micro_batch_max=micro_batch_max) == division


def test_a_batch_that_ranks_cannot_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"16 samples cannot be divided among 3 ranks"):
        divide_global_batch(GLOBAL_BATCH, world_size=3, micro_batch_max=8)


def _order(*, drop_last: bool, epoch: int = 0) -> GlobalSampler:
    sampler = GlobalSampler(RandomSampler(SAMPLES), global_batch=GLOBAL_BATCH, seed=7, drop_last=drop_last)
    sampler.set_epoch(epoch)
    return sampler


def _read_steps(world_size: int, *, skip: int = 0, micro_batch_max: int = 4) -> list[list[int]]:
    """Return the samples of each step over all ranks."""
    division = divide_global_batch(GLOBAL_BATCH, world_size=world_size, micro_batch_max=micro_batch_max)
    steps: dict[int, list[int]] = {}
    for rank in range(world_size):
        batches = RankBatchSampler(_order(drop_last=False), division, rank=rank, world_size=world_size)
        batches.skip_steps(skip)
        for number, batch in enumerate(batches):
            assert len(batch) == division.micro_batch
            steps.setdefault(number // division.accumulate, []).extend(batch)
        assert len(batches) == (number + 1) + skip * division.accumulate
    return [sorted(samples) for _, samples in sorted(steps.items())]


def test_a_step_has_the_same_samples_on_any_number_of_ranks() -> None:
    alone = _read_steps(1)
    assert len(alone) == 4
    assert all(_read_steps(world_size) == alone for world_size in (2, 4, 8, 16))
    assert _read_steps(2, skip=1) == alone[1:]


def test_an_epoch_has_every_sample_and_is_completed_with_the_first_ones() -> None:
    samples = _order(drop_last=False).list_samples()
    assert sorted(samples[:50]) == list(SAMPLES)
    assert samples[50:] == samples[:14]
    assert len(_order(drop_last=False)) == 64
    assert _order(drop_last=True).list_samples() == samples[:48]
    assert len(_order(drop_last=True)) == 48


def test_the_order_depends_on_the_epoch_and_not_on_the_random_state() -> None:
    first = _order(drop_last=False).list_samples()
    torch.rand(3)
    assert _order(drop_last=False).list_samples() == first
    assert _order(drop_last=False, epoch=1).list_samples() != first


def test_samplers_of_frameworks_are_taken_as_the_order_of_all_ranks() -> None:
    shuffled: DistributedSampler[int] = DistributedSampler(DATASET, num_replicas=2, rank=1, seed=7)
    plain: DistributedSampler[int] = DistributedSampler(DATASET, num_replicas=2, rank=1, shuffle=False)
    orders = [GlobalSampler(each, global_batch=10, seed=7, drop_last=False) for each in (shuffled, plain)]
    assert (
        orders[0].list_samples()
        == GlobalSampler(RandomSampler(SAMPLES), global_batch=10, seed=7, drop_last=False).list_samples()
    )
    assert orders[1].list_samples() == list(SAMPLES)


def test_a_loader_is_replaced_with_one_that_has_its_options() -> None:
    loader = DataLoader(DATASET, batch_size=5, timeout=0, drop_last=True)
    assert isinstance(find_sampler(loader), SequentialSampler)
    assert read_batch_size(loader) == 5
    order = GlobalSampler(find_sampler(loader), global_batch=10, seed=0, drop_last=True)
    batches = RankBatchSampler(order, BatchDivision(5, 1), rank=1, world_size=2)
    replaced = PositionedLoader.replace(loader, batches)
    assert next(iter(replaced))[0].tolist() == [1, 3, 5, 7, 9]
    assert len(replaced) == 5


def test_samples_without_positions_are_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ValueError, match="IterableDataset"):
        find_sampler(DataLoader(Stream(), batch_size=2))
    assert isinstance(
        find_sampler(DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(SAMPLES), 2, False))),
        SequentialSampler,
    )
