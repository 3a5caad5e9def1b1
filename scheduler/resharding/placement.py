"""What the state of a model consists of: tensors, how parallelism may cut them, and what an element weighs.

Where the ranks of a plan sit, and which ranks hold each of its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import isfinite

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan

_TYPICAL_LAYER_BYTES = 5040.0 * 2**18
"""Near a real layer's, so that rounding to whole bytes tells nothing apart; all usual degrees divide it."""

_COARSE_SIDE = 2**12 * 3**2 * 5 * 7
"""Rows and columns of tensors whose shape is not known: all usual degrees divide it, so that cuts are equal."""


class TensorSplit(StrEnum):
    """Which axis of a weight [rows, columns] = [outputs, inputs] tensor parallelism cuts (Megatron-LM, arXiv
    1909.08053, section 3): rows of a column-parallel linear, columns of a row-parallel one, none of what every tensor
    rank holds whole."""

    ROWS = "rows"
    COLUMNS = "columns"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """Shape and split of a tensor: tensors of equal extent are cut alike. `experts` is 0 for a dense tensor."""

    rows: int
    columns: int
    split: TensorSplit
    experts: int = 0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter with its optimizer state.

    `layer` counts as the plan counts. `shape` is (rows, columns); a vector has one column. With `experts` above 0 the
    tensor is a stack of as many such matrices, and expert parallelism cuts the stack. `element_bytes` is what one
    element weighs with its optimizer state: 12 under AdamW in fp32, 14 with bf16 weights and an fp32 master.
    """

    name: str
    layer: int
    shape: tuple[int, int]
    element_bytes: float
    split: TensorSplit = TensorSplit.NONE
    experts: int = 0

    def __post_init__(self) -> None:
        for field, value, least in (
            ("layer", self.layer, 0),
            ("experts", self.experts, 0),
            ("shape", min(self.shape), 1),
        ):
            if value < least:
                raise ValueError(f"tensor {self.name!r}: {field} is {value}; it must be {least} or more")
        if not (isfinite(self.element_bytes) and self.element_bytes >= 0):
            raise ValueError(f"tensor {self.name!r}: element_bytes is {self.element_bytes}; it must be 0 or more")

    @property
    def extent(self) -> TensorExtent:
        return TensorExtent(*self.shape, self.split, self.experts)

    @property
    def total_bytes(self) -> float:
        return self.shape[0] * self.shape[1] * max(1, self.experts) * self.element_bytes


def build_layer_tensors(layer_bytes: Sequence[float]) -> tuple[TensorSpec, ...]:
    """Coarse tensors for who knows only the bytes of state of each layer: one half column-parallel, one row-parallel.

    In a transformer layer that is nearly so: norms and biases are small. Experts count as dense.
    """
    elements = _COARSE_SIDE**2
    return tuple(
        TensorSpec(f"layer {layer} {split}", layer, (_COARSE_SIDE, _COARSE_SIDE), size_bytes / 2 / elements, split)
        for layer, size_bytes in enumerate(layer_bytes)
        for split in (TensorSplit.ROWS, TensorSplit.COLUMNS)
    )


@lru_cache(maxsize=256)
def build_equal_layer_tensors(layers: int) -> tuple[TensorSpec, ...]:
    """Coarse tensors of layers of one size, for who needs ratios alone."""
    return build_layer_tensors([_TYPICAL_LAYER_BYTES] * layers)


@dataclass(frozen=True, slots=True, order=True)
class GpuSlot:
    """One GPU: `gpu` is its index on `node`."""

    node: str
    gpu: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan on exact GPUs: rank r sits on `seats[r]`.

    Raises:
        ValueError: there are not as many seats as ranks, or two ranks share one.
    """

    plan: ParallelPlan
    slots: tuple[GpuSlot, ...]

    def __post_init__(self) -> None:
        check_slots(self.plan, self.slots)


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """How a layer's state lies on the GPUs of its stage: all of a LayerStrategy that matters for it.

    `replicas` = dp x ring x ulysses; `shard_group` consecutive ones share a copy, 1 where each has its own.
    """

    tp: int
    replicas: int
    shard_group: int
    ep: int

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """A layer lies on ranks `first_rank` to `first_rank + spread.gpus`, the last not counted."""

    first_rank: int
    sharding: LayerSharding

    @property
    def ranks(self) -> slice:
        return slice(self.first_rank, self.first_rank + self.sharding.gpus)


def check_slots(plan: ParallelPlan, slots: tuple[GpuSlot, ...]) -> None:
    """
    Raises:
        ValueError: there are not as many seats as the plan has ranks, or two ranks share one.
    """
    if len(slots) != plan.world_size:
        raise ValueError(f"seats: there are {len(slots)}; the plan needs {plan.world_size}, one for each rank")
    if len(set(slots)) != len(slots):
        twice = next(seat for number, seat in enumerate(slots) if seat in slots[:number])
        raise ValueError(f"seats: GPU {twice.gpu} of {twice.node} occurs twice; each rank needs its own")


def compute_sharding(strategy: LayerStrategy) -> LayerSharding:
    """Zero 1, 2 and 3 count alike. They differ within a step; the worker runs 2 as FSDP2 that keeps gathered weights
    until the step ends, so that at a step's boundary, when plans change, each holds its shard alone. A shard group of 1
    beside zero is the field left at its default and means all replicas.

    Raises:
        ValueError: shard group and expert degree do not divide the replicas, or neither divides the other.
    """
    replicas, ep = strategy.dp * strategy.ring * strategy.ulysses, strategy.ep
    group = 1
    if strategy.zero:
        group = strategy.shard_group if strategy.shard_group > 1 else replicas
    if replicas % group:
        raise ValueError(f"shard_group is {group}; it must divide the {replicas} replicas")
    if replicas % ep:
        raise ValueError(f"ep is {ep}; it must divide the {replicas} replicas")
    if group % ep and ep % group:
        raise ValueError(f"ep is {ep}; it must divide the shard group of {group} replicas, or be a multiple of it")
    return LayerSharding(strategy.tp, replicas, group, ep)


def compute_layer_placements(plan: ParallelPlan) -> tuple[LayerPlacement, ...]:
    """The place of each layer of the plan, in order: stage k lies on group k mod `plan.devices`.

    Raises:
        ValueError: stages do not follow one another, their strategies count other layers, two stages of one group
            differ in GPUs, or a strategy contradicts itself.
    """
    places = list[LayerPlacement]()
    widths = [stage.gpus for stage in plan.stages[: plan.pipeline_devices]]
    for number, stage in enumerate(plan.stages):
        group = number % plan.pipeline_devices
        named = f"stage {stage.first_layer}-{stage.last_layer}"
        if stage.gpus != widths[group]:
            raise ValueError(f"{named} has {stage.gpus} GPUs; its group, {group}, has {widths[group]}")
        counted = sum(run.layers for run in stage.strategies)
        if stage.first_layer != len(places) or stage.last_layer + 1 - stage.first_layer != counted:
            raise ValueError(f"{named} has strategies for {counted} layers, after {len(places)} layers before it")
        first = sum(widths[:group])
        for run in stage.strategies:
            places += [LayerPlacement(first, compute_sharding(run))] * run.layers
    return tuple(places)


def check_tensor_layers(placements: tuple[LayerPlacement, ...], tensors: Iterable[TensorSpec]) -> None:
    """
    Raises:
        ValueError: the tensors belong to other layers than the plan has.
    """
    present = {tensor.layer for tensor in tensors}
    if present != set(range(len(placements))):
        wrong = min(present.symmetric_difference(range(len(placements))))
        told = "has none" if wrong < len(placements) else "is not one of them"
        raise ValueError(
            f"tensors: each of the plan's layers 0 to {len(placements) - 1} needs one; layer {wrong} {told}"
        )
