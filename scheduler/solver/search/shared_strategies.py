"""Strategies that all stages of a pipeline can share, for plans with one strategy for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.solver.costs.pipeline_costs import CostedStrategies
from scheduler.solver.instance import Ints
from scheduler.solver.search.stage_bounds import find_undominated_columns, list_comparable_costs


def list_shared_strategies(
    groups: Sequence[CostedStrategies], types: Ints, *, in_flight_max: float
) -> list[tuple[tuple[Ints, ...], float]]:
    """Return the strategies that can be of use for a whole plan of layers of `types`.

    For each one: its number in every group as an array, and the least time of a micro-batch through all layers.

    In a plan of one strategy there are no changes of layout. So strategies with different layouts compare as well:
    one that costs no more than another in any respect, in every group, replaces it in all layers.
    """
    shared = _match_strategies(groups)
    if not shared.size:
        return []
    rows = [
        list_comparable_costs(costed.costs.select_strategies(numbers), in_flight_max=in_flight_max)
        for costed, numbers in zip(groups, shared, strict=True)
    ]
    useful = find_undominated_columns(np.concatenate(rows))
    counts = np.bincount(types, minlength=len(groups[0].costs.time_s))
    least_s = np.minimum.reduce(
        [costed.costs.time_s[:, numbers] for costed, numbers in zip(groups, shared, strict=True)]
    )
    layers_s = (counts @ least_s).tolist()
    return [(tuple(numbers[at : at + 1] for numbers in shared), layers_s[at]) for at in useful.tolist()]


def _match_strategies(groups: Sequence[CostedStrategies]) -> Ints:
    """Return [G, N]: the numbers that each strategy which all groups have has in each of them."""
    if len(groups) == 1:
        return np.arange(groups[0].costs.strategies)[None]
    listed = [{costed.build_strategy(number): number for number in range(costed.costs.strategies)} for costed in groups]
    common = [strategy for strategy in listed[0] if all(strategy in others for others in listed[1:])]
    return np.array([[numbers[strategy] for strategy in common] for numbers in listed], dtype=np.int64)
