"""The costs of every strategy on stages of one width, for all numbers of micro-batches in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.candidates import Candidates, candidates
from scheduler.solver.costs.chain import Chain, Layer
from scheduler.solver.costs.layer_table import layer_table
from scheduler.solver.costs.layer_time import layer_times
from scheduler.solver.costs.layouts import border_s, layouts_of, reshard_s
from scheduler.solver.costs.memory_cost import kept_bytes, state_bytes, working_bytes
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.spreads import Limits
from scheduler.solver.instance import Floats, Ints, StageCosts


@dataclass(frozen=True, slots=True, eq=False)
class CostedStrategies:
    """The strategies of a stage at one number of micro-batches: their costs, and what they are.

    `costs` has one row a layer type (in order of first appearance in the chain) and one column a strategy.
    """

    costs: StageCosts
    _candidates: Candidates
    _first: int

    def strategy(self, number: int) -> LayerStrategy:
        """What strategy `number` of the costs is, for one layer."""
        return self._candidates.strategy(self._first + number)


@lru_cache(maxsize=256)
def stage_costs(layers: Chain, setting: Setting) -> Mapping[int, CostedStrategies]:
    """Costs by number of micro-batches (divisors of the global batch), where there is at least one strategy.

    Strategies that cannot win whatever the other layers do are left out (spreads.py and candidates.py say which).
    """
    kinds = layers.kinds
    chosen = candidates(
        Limits.of(kinds), setting.hardware.dimensions, setting.node_gpus, setting.gpus, setting.global_batch
    )
    if not len(chosen.spread):
        return {}
    counts, firsts = np.unique(chosen.micro_batches, return_index=True)
    joint, changes_s = _joint(kinds, chosen, setting.global_batch // counts, setting)
    found = {}
    ends = [*firsts[1:].tolist(), len(chosen.spread)]
    for row, (count, first, end) in enumerate(zip(counts.tolist(), firsts.tolist(), ends, strict=True)):
        costs = StageCosts(
            layouts=joint.layouts[first:end],
            time_s=joint.time_s[:, first:end],
            state_bytes=joint.state_bytes[:, first:end],
            kept_bytes=joint.kept_bytes[:, first:end],
            working_bytes=joint.working_bytes[first:end],
            reshard_s=changes_s[row],
            border_s=joint.border_s[:, first:end],
        )
        found[count] = CostedStrategies(costs, chosen, first)
    return found


def _joint(kinds: tuple[Layer, ...], chosen: Candidates, batches: Ints, setting: Setting) -> tuple[StageCosts, Floats]:
    """All numbers of micro-batches side by side. Changes of layout [C, T, K, K] apart: they depend on the number."""
    table, spread = layer_table(kinds), chosen.spreads
    layouts, numbers = layouts_of(spread)
    changes_s = reshard_s(table, layouts, batches, setting)
    costs = StageCosts(
        layouts=numbers[chosen.spread],
        time_s=layer_times(kinds, chosen, setting).total_s,
        state_bytes=state_bytes(kinds, chosen, setting),
        kept_bytes=kept_bytes(kinds, chosen, setting),
        working_bytes=working_bytes(kinds, chosen, setting),
        reshard_s=changes_s[0],
        border_s=border_s(table, spread, setting)[:, chosen.spread],
    )
    return costs, changes_s
