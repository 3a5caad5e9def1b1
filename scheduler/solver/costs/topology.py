"""Which link a group of GPUs talks over.

GPUs are numbered node by node. Stage i takes the i-th block of `stage_gpus` numbers, and inside a stage the ranks
of one tensor-parallel group are neighbours. A tensor-parallel group therefore stays inside a node as long as its
degree divides the GPUs of a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.solver.costs.collectives import Link
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.request import SolveRequest


@dataclass(frozen=True, slots=True)
class Topology:
    """Equal nodes of `node_gpus` GPUs; uneven nodes count as more, smaller ones (their greatest common divisor)."""

    node_gpus: int
    intra: Link
    inter: Link

    @classmethod
    def of(cls, request: SolveRequest) -> Topology:
        hardware: HardwareProfile = request.hardware
        return cls(
            node_gpus=request.node_gpus,
            intra=Link(hardware.intra_bandwidth_bytes_per_s, hardware.intra_latency_s),
            inter=Link(hardware.inter_bandwidth_bytes_per_s, hardware.inter_latency_s),
        )

    def data_link(self, *, stage_gpus: int, tp: int) -> Link:
        """The ring over the data-parallel replicas of a stage of `stage_gpus` GPUs.

        Where the stage spans nodes, the replicas that share a node share its network ports too: the ring is laid
        through all of them, and so reaches that many times one GPU's port, though never more than the links inside.
        """
        if self.node_gpus % stage_gpus == 0:
            return self.intra
        ports = min(stage_gpus, self.node_gpus) // tp
        bandwidth = min(self.intra.bandwidth_bytes_per_s, max(1, ports) * self.inter.bandwidth_bytes_per_s)
        return Link(bandwidth, self.inter.latency_s)

    def hand_over_link(self, *, cut: int, stage_gpus: int) -> Link:
        """Between stage `cut` (from 0) and the next one, each GPU to its counterpart."""
        sender, receiver = cut * stage_gpus, (cut + 1) * stage_gpus
        inside = self.node_gpus % stage_gpus == 0 and sender // self.node_gpus == receiver // self.node_gpus
        return self.intra if inside else self.inter
