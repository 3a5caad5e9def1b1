"""Workbench: what several searches share."""

from __future__ import annotations

from scheduler.solver.costs.chain import Chain
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.stage_costs import CostedStrategies
from scheduler.solver.search.stage_oracle import StageOracle


class Workbench:
    """Kept over the searches of one curve: a stage on the same GPUs in a longer pipeline is not worked out again.

    Not for sharing between threads.
    """

    def __init__(self) -> None:
        self._oracles: dict[tuple[Chain, Setting, int, int], StageOracle] = {}

    def oracle(
        self,
        layers: Chain,
        setting: Setting,
        costed: CostedStrategies,
        *,
        micro_batches: int,
        capacity_bytes: int,
    ) -> StageOracle:
        """Of a stage of `setting` with `capacity_bytes` a GPU."""
        key = layers, setting, micro_batches, capacity_bytes
        if key not in self._oracles:
            self._oracles[key] = StageOracle(
                layers.types, costed.costs, capacity_bytes=capacity_bytes, in_flight_max=micro_batches
            )
        return self._oracles[key]
