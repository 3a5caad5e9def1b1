"""The tensors of a model, and where the ranks of a plan and the layers that they hold are placed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import isfinite

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan

_TYPICAL_LAYER_BYTES = 5040.0 * 2**18
"""Close to a real layer's size, so that rounding to whole bytes makes no difference. All usual degrees divide it."""

_COARSE_SIDE = 2**12 * 3**2 * 5 * 7
"""Rows and columns of tensors of unknown shape. All usual degrees divide it, so that shards are equal."""


class TensorSplit(StrEnum):
    """The axis of a weight [rows, columns] = [outputs, inputs] that tensor parallelism splits.

    Source: Megatron-LM, arXiv 1909.08053, section 3.

    Rows of a column-parallel linear layer, columns of a row-parallel one, or none if every tensor rank holds the whole
    tensor.
    """

    ROWS = "rows"
    COLUMNS = "columns"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """Shape and split of a tensor: tensors of equal extent have equal shards. `experts` is 0 for a dense tensor."""

    rows: int
    columns: int
    split: TensorSplit
    experts: int = 0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter with its optimizer state.

    Attributes:
        layer: number of the layer, as in the plan.
        shape: (rows, columns); a vector has one column.
        element_bytes: size of one element with its optimizer state: 12 under AdamW in fp32, 14 with bf16 weights and an
            fp32 master.
        experts: if above 0, the tensor is a stack of this many matrices, and expert parallelism splits the stack.
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
    """Return coarse tensors for layers of which only the bytes of state are known.

    Half of the bytes are column-parallel, half are row-parallel.

    This is nearly exact for a transformer layer, whose norms and biases are small. Experts count as dense.
    """
    elements = _COARSE_SIDE**2
    return tuple(
        TensorSpec(f"layer {layer} {split}", layer, (_COARSE_SIDE, _COARSE_SIDE), size_bytes / 2 / elements, split)
        for layer, size_bytes in enumerate(layer_bytes)
        for split in (TensorSplit.ROWS, TensorSplit.COLUMNS)
    )


@lru_cache(maxsize=256)
def build_equal_layer_tensors(layers: int) -> tuple[TensorSpec, ...]:
    """Return coarse tensors of layers of equal size, for callers that need only ratios."""
    return build_layer_tensors([_TYPICAL_LAYER_BYTES] * layers)


@dataclass(frozen=True, slots=True, order=True)
class GpuSlot:
    """One GPU: its node, and its index on the node."""

    node: str
    gpu: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan on specific GPUs: rank r runs on `slots[r]`.

    Raises:
        ValueError: the number of slots differs from the number of ranks, or two ranks share a slot.
    """

    plan: ParallelPlan
    slots: tuple[GpuSlot, ...]

    def __post_init__(self) -> None:
        check_slots(self.plan, self.slots)


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """How a layer's state is distributed over the GPUs of its stage.

    `replicas` = dp x ring x ulysses. Each group of `shard_group` consecutive replicas shares one copy; 1 means that
    each replica has its own copy.
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
    """A layer on ranks `first_rank` to `first_rank + sharding.gpus`, the end excluded."""

    first_rank: int
    sharding: LayerSharding

    @property
    def ranks(self) -> slice:
        return slice(self.first_rank, self.first_rank + self.sharding.gpus)


def check_slots(plan: ParallelPlan, slots: tuple[GpuSlot, ...]) -> None:
    """Check that there is one distinct slot per rank of the plan.

    Raises:
        ValueError: there is not.
    """
    if len(slots) != plan.world_size:
        raise ValueError(f"slots has {len(slots)} GPUs; it must have {plan.world_size}, one per rank")
    if len(set(slots)) != len(slots):
        duplicate = next(slot for number, slot in enumerate(slots) if slot in slots[:number])
        raise ValueError(f"slots has GPU {duplicate.gpu} of {duplicate.node} twice; each rank must have its own GPU")


def compute_sharding(strategy: LayerStrategy) -> LayerSharding:
    """Return the sharding of a strategy. ZeRO-1, 2 and 3 count as equal.

    They differ only within a step. The worker runs ZeRO-2 as FSDP2 that keeps gathered weights until the step ends, so
    each rank holds only its shard at a step boundary, when plans change. With ZeRO, a shard group of 1 is the default
    and means all replicas.

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
    """Return the placement of each layer of the plan, in order: stage k is on group k mod `plan.pipeline_devices`.

    Raises:
        ValueError: stages are not contiguous, their strategies cover other layers, two stages of one group differ in
            GPUs, or a strategy is inconsistent.
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
    """Check that the tensors belong to exactly the layers of the plan.

    Raises:
        ValueError: they do not.
    """
    present = {tensor.layer for tensor in tensors}
    if present != set(range(len(placements))):
        wrong = min(present.symmetric_difference(range(len(placements))))
        problem = "has no tensor" if wrong < len(placements) else "has a tensor"
        raise ValueError(f"layer {wrong} {problem}; the plan's layers 0 to {len(placements) - 1} must have tensors")
