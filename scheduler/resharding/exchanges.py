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
    Ulysses, ring, expert and hybrid shard groups. What else they send goes to all of the stage alike, and each node
    keeps as many of them, so they may change places."""
    found, first = list[tuple[int, Block]](), 0
    for group in range(plan.devices):
        stages = plan.stages[group :: plan.devices]
        size = lcm(*(_unit(strategy) for stage in stages for strategy in stage.strategies))
        end = first + stages[0].gpus
        for start in range(first, end, size):
            block = tuple(range(start, min(start + size, end)))
            if len({seats[order[rank]].node for rank in block}) == 1:
                found.append((group, block))
        first = end
    return _grouped(found)


def alike_ranks(plan: ParallelPlan) -> list[list[Block]]:
    """Each rank by itself; alike are those whose stages want the same GPU model."""
    return _grouped((model, (rank,)) for rank, model in enumerate(_models(plan)))


def _models(plan: ParallelPlan) -> list[str]:
    return [stage.gpu for stage in plan.stages[: plan.devices] for _ in range(stage.gpus)]


def _unit(strategy: LayerStrategy) -> int:
    spread = spread_of(strategy)
    hybrid = spread.shard_group if spread.shard_group < spread.replicas else 1
    return strategy.tp * lcm(strategy.ulysses * strategy.ring, strategy.ep, hybrid)


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> list[list[Value]]:
    groups: defaultdict[Key, list[Value]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return list(groups.values())
