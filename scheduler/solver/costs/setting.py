"""Setting: what the costs of a layer depend on, beside the layer and its strategy."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from scheduler.solver.profiles.hardware_profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class Setting:
    """Stages of `gpus` GPUs each, of one model, in a job of `global_batch` samples an optimizer step.

    GPUs are numbered node by node, and stage i takes the i-th block of them. `node_gpus` is how many of a stage's GPUs
    share a node wherever the stage lies: the greatest common divisor of a node and a stage. Make one with `of`.
    """

    hardware: HardwareProfile
    node_gpus: int
    gpus: int
    global_batch: int

    @classmethod
    def of(cls, hardware: HardwareProfile, *, node_gpus: int, gpus: int, global_batch: int) -> Setting:
        """`node_gpus` is that of the cluster: equal nodes; uneven ones count as their greatest common divisor.

        Stages of one width on nodes of unlike size can so be equal settings, and share their costs.
        """
        return cls(hardware, gcd(node_gpus, gpus), gpus, global_batch)
