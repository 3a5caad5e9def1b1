"""Where the ranks of a plan sit, and which ranks hold each of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.resharding.tensors import TensorFacts


@dataclass(frozen=True, slots=True, order=True)
class Seat:
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
    seats: tuple[Seat, ...]

    def __post_init__(self) -> None:
        check_seats(self.plan, self.seats)


@dataclass(frozen=True, slots=True)
class Spread:
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
class LayerPlace:
    """A layer lies on ranks `first_rank` to `first_rank + spread.gpus`, the last not counted."""

    first_rank: int
    spread: Spread

    @property
    def ranks(self) -> slice:
        return slice(self.first_rank, self.first_rank + self.spread.gpus)


def check_seats(plan: ParallelPlan, seats: tuple[Seat, ...]) -> None:
    """
    Raises:
        ValueError: there are not as many seats as the plan has ranks, or two ranks share one.
    """
    if len(seats) != plan.world_size:
        raise ValueError(f"seats: there are {len(seats)}; the plan needs {plan.world_size}, one for each rank")
    if len(set(seats)) != len(seats):
        twice = next(seat for number, seat in enumerate(seats) if seat in seats[:number])
        raise ValueError(f"seats: GPU {twice.gpu} of {twice.node} occurs twice; each rank needs its own")


def spread_of(strategy: LayerStrategy) -> Spread:
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
    return Spread(strategy.tp, replicas, group, ep)


def layer_places(plan: ParallelPlan) -> tuple[LayerPlace, ...]:
    """The place of each layer of the plan, in order: stage k lies on group k mod `plan.devices`.

    Raises:
        ValueError: stages do not follow one another, their strategies count other layers, two stages of one group
            differ in GPUs, or a strategy contradicts itself.
    """
    places = list[LayerPlace]()
    widths = [stage.gpus for stage in plan.stages[: plan.devices]]
    for number, stage in enumerate(plan.stages):
        group = number % plan.devices
        named = f"stage {stage.first_layer}-{stage.last_layer}"
        if stage.gpus != widths[group]:
            raise ValueError(f"{named} has {stage.gpus} GPUs; its group, {group}, has {widths[group]}")
        counted = sum(run.layers for run in stage.strategies)
        if stage.first_layer != len(places) or stage.last_layer + 1 - stage.first_layer != counted:
            raise ValueError(f"{named} has strategies for {counted} layers, after {len(places)} layers before it")
        first = sum(widths[:group])
        for run in stage.strategies:
            places += [LayerPlace(first, spread_of(run))] * run.layers
    return tuple(places)


def check_layers(places: tuple[LayerPlace, ...], tensors: Iterable[TensorFacts]) -> None:
    """
    Raises:
        ValueError: the tensors belong to other layers than the plan has.
    """
    present = {tensor.layer for tensor in tensors}
    if present != set(range(len(places))):
        wrong = min(present.symmetric_difference(range(len(places))))
        told = "has none" if wrong < len(places) else "is not one of them"
        raise ValueError(f"tensors: each of the plan's layers 0 to {len(places) - 1} needs one; layer {wrong} {told}")
