"""Setting: what the cost of a layer depends on, beside the layer and its strategy."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.solver.costs.topology import Topology
from scheduler.solver.profiles.hardware_profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class Setting:
    """One choice of pipeline degree and micro-batches.

    `micro_batch_size` counts samples over all replicas of a stage; each stage has `stage_gpus` GPUs.
    """

    hardware: HardwareProfile
    topology: Topology
    stages: int
    stage_gpus: int
    micro_batches: int
    micro_batch_size: int

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations stage `stage` (from 0) holds at its peak under 1F1B.

        The last stage runs backward at once and holds one; each stage before it holds one more (Narayanan et al.,
        SC'21, section 2.2).
        """
        return min(self.micro_batches, self.stages - stage)
