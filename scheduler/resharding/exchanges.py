"""Which ranks of a plan may exchange their GPUs without making the plan slower than the solver thought it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from math import lcm
from typing import TypeVar

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.resharding.placement import Seat, spread_of

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Block = tuple[int, ...]
"""Ranks that go to the GPUs of another block together."""


def nodes_alike(plan: ParallelPlan, seats: Sequence[Seat], order: Sequence[int]) -> list[list[Block]]:
    """The ranks of each node, `order` being the seat of each rank. Nodes are alike with as many ranks, for stages of
    the same GPU models: exchanging them as a whole leaves together who was together."""
    models = _models(plan)
    by_node = map(tuple, _grouped((seats[seat].node, rank) for rank, seat in enumerate(order)))
    return _grouped((tuple(sorted(models[rank] for rank in block)), block) for block in by_node)


def alike_units(plan: ParallelPlan, seats: Sequence[Seat], order: Sequence[int]) -> list[list[Block]]:
    """Runs of ranks of one stage that share a node and have all their quick communication among themselves: tensor,
    Ulysses and ring groups, and those expert and hybrid shard groups that fit into a node. What else they send goes to
    all of the stage, or of a wider such group, alike, and each node keeps as many of those, so they may change places.
    """
    found, first = list[tuple[tuple[int, ...], Block]](), 0
    for group in range(plan.devices):
        stages = plan.stages[group :: plan.devices]
        strategies = [strategy for stage in stages for strategy in stage.strategies]
        nodes = [seats[seat].node for seat in order[first : first + stages[0].gpus]]
        together = {size for strategy in strategies for size in _group_sizes(strategy)}
        wide = sorted(size for size in together if not _fits(nodes, size))
        inner = (strategy.tp * strategy.ulysses * strategy.ring for strategy in strategies)
        size = lcm(*inner, *together.difference(wide))
        for start in range(0, len(nodes), size):
            end = start + size
            if len(set(nodes[start:end])) == 1:
                key = (group, *(at // width for width in wide for at in (start, end - 1)))
                found.append((key, tuple(range(first + start, first + end))))
        first += len(nodes)
    return _grouped(found)


def alike_ranks(plan: ParallelPlan) -> list[list[Block]]:
    """Each rank by itself; alike are those whose stages want the same GPU model."""
    return _grouped((model, (rank,)) for rank, model in enumerate(_models(plan)))


def _models(plan: ParallelPlan) -> list[str]:
    return [stage.gpu for stage in plan.stages[: plan.devices] for _ in range(stage.gpus)]


def _group_sizes(strategy: LayerStrategy) -> tuple[int, int]:
    """Consecutive ranks that share a stack of experts, and that share a copy of the layer while others have another."""
    spread = spread_of(strategy)
    hybrid = spread.shard_group if spread.shard_group < spread.replicas else 1
    return strategy.tp * strategy.ep, strategy.tp * hybrid


def _fits(nodes: Sequence[str], size: int) -> bool:
    return all(len(set(nodes[start : start + size])) == 1 for start in range(0, len(nodes), size))


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> list[list[Value]]:
    groups: defaultdict[Key, list[Value]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return list(groups.values())
