"""Shards: partitions, copies, validation, and equality with what torch gives each rank."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.resharding.placement import (
    TensorSpec,
    TensorSplit,
    build_layer_tensors,
    compute_layer_placements,
    compute_sharding,
)
from scheduler.resharding.shards import Interval, compute_shards
from tests.builders_resharding import a_plan, a_random_plan

DRAWN = settings(max_examples=100, deadline=None, derandomize=True)
Box = tuple[Interval, Interval, Interval]


def _tensors(rng: random.Random, layers: int, experts: int) -> list[TensorSpec]:
    """Return small shapes, most of which no degree divides."""
    tensors = list[TensorSpec]()
    for layer in range(layers):
        for split in TensorSplit:
            shape = (rng.randint(1, 13), rng.randint(1, 13))
            tensors.append(TensorSpec(f"{layer} {split}", layer, shape, 12.0, split, rng.choice([0, experts])))
    return tensors


def _held(plan: ParallelPlan, tensors: list[TensorSpec]) -> list[Counter[Box]]:
    """Return the boxes of each tensor, with the number of ranks that hold each."""
    boxes: list[Counter[Box]] = [Counter() for _ in tensors]
    for rank in compute_shards(plan, tensors):
        for shard in rank:
            boxes[shard.tensor][shard.experts, shard.rows, shard.columns] += 1
    return boxes


def _size(box: Box) -> int:
    return prod(end - first for first, end in box)


def _meet(box: Box, other: Box) -> bool:
    return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(box, other, strict=True))


@DRAWN
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 6, 8, 16, 24]), st.sampled_from([0, 4, 8]))
def test_distinct_shards_partition_a_tensor(seed: int, gpus: int, experts: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(8, 10)
    plan, tensors = a_random_plan(rng, gpus, layers, experts=experts), _tensors(rng, layers, experts)
    for tensor, boxes in zip(tensors, _held(plan, tensors), strict=True):
        assert sum(map(_size, boxes)) == prod(tensor.shape) * max(1, tensor.experts)
        distinct = list(boxes)
        assert not any(_meet(box, other) for number, box in enumerate(distinct) for other in distinct[:number])


@DRAWN
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([0, 8]))
def test_copies_per_element_match_the_strategy(seed: int, gpus: int, experts: int) -> None:
    rng = random.Random(seed)
    plan = a_random_plan(rng, gpus, 8, experts=experts)
    tensors = [
        TensorSpec(f"{layer} {split} {stack}", layer, (64, 64), 12.0, split, stack)
        for layer in range(8)
        for split in TensorSplit
        for stack in {0, experts}
    ]
    places = compute_layer_placements(plan)
    for tensor, boxes in zip(tensors, _held(plan, tensors), strict=True):
        spread = places[tensor.layer].sharding
        ep = spread.ep if tensor.experts else 1
        sharers = max(1, spread.shard_group // ep)
        copies = spread.replicas // (ep * sharers) * (spread.tp if tensor.split is TensorSplit.NONE else 1)
        assert set(boxes.values()) == {copies}


def test_interleaved_stages_share_the_ranks_of_their_group() -> None:
    plan = a_plan([[LayerStrategy(1, tp=2)] for _ in range(4)], interleave=2)
    layers = [{shard.tensor // 2 for shard in rank} for rank in compute_shards(plan, build_layer_tensors([8.0] * 4))]
    assert layers == [{0, 2}, {0, 2}, {1, 3}, {1, 3}]


def test_each_run_of_layers_follows_its_own_strategy() -> None:
    plan = a_plan([[LayerStrategy(1, dp=2), LayerStrategy(1, tp=2)]])
    tensors = [
        TensorSpec("whole", 0, (4, 4), 12.0, TensorSplit.ROWS),
        TensorSpec("cut", 1, (4, 4), 12.0, TensorSplit.ROWS),
    ]
    assert [[shard.rows for shard in rank] for rank in compute_shards(plan, tensors)] == [
        [(0, 4), (0, 2)],
        [(0, 4), (2, 4)],
    ]


def test_zero_1_2_and_3_have_equal_shards_at_step_boundaries() -> None:
    assert len({compute_sharding(LayerStrategy(1, dp=4, zero=zero)) for zero in (1, 2, 3)}) == 1


def test_coarse_tensors_have_the_bytes_of_their_layers() -> None:
    tensors = build_layer_tensors([3.0, 7e9])
    assert [tensor.layer for tensor in tensors] == [0, 0, 1, 1]
    assert sum(tensor.total_bytes for tensor in tensors) == pytest.approx(7e9 + 3)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (LayerStrategy(1, dp=6, zero=3, shard_group=4), "shard_group is 4; it must divide the 6 replicas"),
        (LayerStrategy(1, dp=6, ep=4), "ep is 4; it must divide the 6 replicas"),
        (LayerStrategy(1, dp=12, zero=3, shard_group=6, ep=4), "ep is 4; it must divide the shard group of 6"),
    ],
)
def test_inconsistent_strategy_is_rejected(strategy: LayerStrategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_shards(a_plan([[strategy]]), build_layer_tensors([1.0]))


@pytest.mark.parametrize(("count", "message"), [(1, "layer 1 has no tensor"), (3, "layer 2 has a tensor")])
def test_tensors_of_other_layers_are_rejected(count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_shards(a_plan([[LayerStrategy(2)]]), build_layer_tensors([1.0] * count))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"layer": -1}, "layer is -1; it must be 0 or more"),
        ({"shape": (0, 3)}, "shape is 0; it must be 1 or more"),
        ({"element_bytes": float("nan")}, "element_bytes is nan"),
    ],
)
def test_invalid_tensor_is_rejected(tensor: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"name": "w", "layer": 0, "shape": (1, 1), "element_bytes": 1.0} | tensor
    with pytest.raises(ValueError, match=message):
        TensorSpec(**fields)  # type: ignore[arg-type]  # any field


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Make torch believe that it is one rank of many; nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _numbered(*shape: int) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


class _Layer(nn.Module):
    """A column-parallel and a row-parallel linear and a norm, every element a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.column, self.row, self.norm = nn.Linear(5, 12, bias=False), nn.Linear(12, 7, bias=False), nn.LayerNorm(10)
        for weight in (self.column.weight, self.row.weight, self.norm.weight):
            with torch.no_grad():
                weight.copy_(_numbered(*weight.shape))


_LAYER = [
    TensorSpec("column", 0, (12, 5), 12.0, TensorSplit.ROWS),
    TensorSpec("row", 0, (7, 12), 12.0, TensorSplit.COLUMNS),
    TensorSpec("norm", 0, (10, 1), 12.0, TensorSplit.NONE),
]


def _torch_layer(strategy: LayerStrategy) -> list[torch.Tensor]:
    """Return what this rank holds of a `_Layer` under tensor parallelism and FSDP2, composed as torch documents it."""
    spread, layer = compute_sharding(strategy), _Layer()
    copies = spread.replicas // spread.shard_group
    mesh = init_device_mesh(
        "cpu", (copies, spread.shard_group, spread.tp), mesh_dim_names=("replicate", "shard", "tensor")
    )
    if spread.tp > 1:
        parallelize_module(
            layer, mesh["tensor"], {"column": ColwiseParallel(), "row": RowwiseParallel()}, src_data_rank=None
        )
    if strategy.zero:
        fully_shard(layer, mesh=mesh["replicate", "shard"] if copies > 1 else mesh["shard"])
    weights = (layer.column.weight, layer.row.weight, layer.norm.weight)
    return [weight.to_local() if isinstance(weight, DTensor) else weight.data for weight in weights]


@pytest.mark.parametrize(
    "strategy",
    [
        LayerStrategy(1, dp=4, zero=3),
        LayerStrategy(1, dp=3, zero=3),
        LayerStrategy(1, dp=8, zero=3),
        LayerStrategy(1, tp=2, dp=1),
        LayerStrategy(1, tp=2, dp=2, zero=3),
        LayerStrategy(1, tp=4, dp=4, zero=3),
        LayerStrategy(1, tp=2, dp=2, ulysses=2, zero=3),
        LayerStrategy(1, tp=2, dp=4, zero=3, shard_group=2),
        LayerStrategy(1, dp=6, zero=3, shard_group=3),
    ],
    ids=lambda one: f"tp{one.tp} dp{one.dp} ulysses{one.ulysses} group{one.shard_group}",
)
def test_shards_match_torch(strategy: LayerStrategy) -> None:
    held = compute_shards(a_plan([[strategy]]), _LAYER)
    whole = [_numbered(*tensor.shape) for tensor in _LAYER]
    for rank, own in enumerate(held):
        with _as_rank(rank, len(held)):
            given = _torch_layer(strategy)
        found = {shard.tensor: whole[shard.tensor][slice(*shard.rows), slice(*shard.columns)] for shard in own}
        for number, local in enumerate(given):
            expected = found.get(number, torch.empty(0))
            assert torch.equal(local.reshape(-1), expected.reshape(-1)), (rank, _LAYER[number].name)


@pytest.mark.parametrize(("dp", "ep", "zero"), [(4, 2, 0), (4, 2, 3), (8, 2, 3), (8, 8, 3), (6, 3, 3)])
def test_expert_shards_match_torch(dp: int, ep: int, zero: int) -> None:
    strategy, experts = LayerStrategy(1, dp=dp, ep=ep, zero=zero), 24
    held = compute_shards(a_plan([[strategy]]), [TensorSpec("experts", 0, (12, 3), 12.0, TensorSplit.NONE, experts)])
    whole = _numbered(experts, 12, 3)
    for rank, own in enumerate(held):
        with _as_rank(rank, dp):
            mesh = init_device_mesh("cpu", (dp // ep, ep), mesh_dim_names=("shard", "expert"))
            stack = nn.Module()
            cut = distribute_tensor(whole, mesh["expert"], [Shard(0)], src_data_rank=None)
            stack.weight = nn.Parameter(cut)
            if zero:
                fully_shard(stack, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(1))
            assert isinstance(stack.weight, DTensor)
            local = stack.weight.to_local()
        expected = [whole[slice(*box.experts), slice(*box.rows), slice(*box.columns)] for box in own]
        assert torch.equal(local.reshape(-1), torch.cat([part.reshape(-1) for part in expected])), rank
