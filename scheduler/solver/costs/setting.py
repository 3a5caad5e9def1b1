"""Setting: what the costs of a layer depend on, beside the layer and its strategy."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from scheduler.solver.profiles.hardware_profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class Setting:
    """Stages of `gpus` GPUs each, of one model, in a job of `global_batch` samples an optimizer step.

    GPUs are numbered node by node, and stage i takes the i-th block of them. `node_gpus` is how many of a stage's GPUs
    share a node wherever the stage lies: the greatest common divisor of a node and a stage. `node_gpus_min` is how many
    it has at least in each of its nodes: more where it takes all of some uneven nodes. Make one with `of`.
    """

    hardware: HardwareProfile
    node_gpus: int
    gpus: int
    global_batch: int
    node_gpus_min: int

    @classmethod
    def of(
        cls, hardware: HardwareProfile, *, node_gpus: int, gpus: int, global_batch: int, node_gpus_min: int = 0
    ) -> Setting:
        """`node_gpus` is that of the cluster: equal nodes; uneven ones count as their greatest common divisor.

        Stages of one width on nodes of unlike size can so be equal settings, and share their costs. `node_gpus_min` is
        the smallest node of a stage that takes all nodes; 0 for any other.
        """
        shared = gcd(node_gpus, gpus)
        return cls(hardware, shared, gpus, global_batch, node_gpus_min or shared)
