"""Hand-overs between the stages of a pipeline: the activation forward and its gradient back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd

import numpy as np

from scheduler.solver.costs.chain import Chain, Layer
from scheduler.solver.costs.collectives import send_s
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class StageGroup:
    """The stages on GPUs of one model: `count` of `gpus` GPUs each, on nodes of `node_gpus` (of the cluster)."""

    hardware: HardwareProfile
    node_gpus: int
    gpus: int
    count: int

    @property
    def leaves_node(self) -> bool:
        """Some neighbouring stages of the group lie in different nodes."""
        return bool(self.node_gpus % self.gpus) or self.count * self.gpus > self.node_gpus

    def crosses(self, cut: int) -> bool:
        """Whether stage `cut` (of this group alone, from 0) and the next one lie in different nodes."""
        sender, receiver = cut * self.gpus, (cut + 1) * self.gpus
        return bool(self.node_gpus % self.gpus) or sender // self.node_gpus != receiver // self.node_gpus


def hand_over_s(layer: Layer, batch: int, sender: StageGroup, receiver: StageGroup, *, crosses: bool) -> float:
    """After `layer`, for a micro-batch of `batch` samples, from a stage of one group to a stage of another or the same.

    Every GPU sends an equal share of the micro-batch to its counterpart (the scatter of Megatron's scatter-gather,
    SC'21, section 4.1), so the time does not depend on the strategies of either side. Between groups the slower side
    sets the pace. No gradient goes back to layers without a backward pass.
    """
    share_bytes = layer.boundary_bytes * batch / min(sender.gpus, receiver.gpus)
    directions = 2 if layer.backward else 1
    return directions * max(_send_s(share_bytes, side, crosses) for side in (sender, receiver))


def hand_over_times_s(layers: Chain, groups: tuple[StageGroup, ...], batch: int, *, interleave: int = 1) -> Floats:
    """[P-1, G, G, L+1] at cut p, from group to group, if the next stage begins with layer a; infinite for a = 0 and L.

    [P, ...] where the pipeline is interleaved: the last row leads from the last device back to the first. In a mixed
    pipeline the places of a group's stages are open: its hand-overs count as between nodes if any of them can be.
    """
    devices = sum(group.count for group in groups)
    kinds, types = layers.kinds, layers.types[:-1]
    cuts = devices if interleave > 1 else devices - 1
    table = np.full((cuts, len(groups), len(groups), len(layers) + 1), np.inf)
    for (one, sender), (two, receiver) in product(enumerate(groups), repeat=2):
        near_s, far_s = (
            np.array([hand_over_s(kind, batch, sender, receiver, crosses=crosses) for kind in kinds])[types]
            for crosses in (False, True)
        )
        if len(groups) == 1:
            far = [sender.crosses(cut) if cut < devices - 1 else sender.leaves_node for cut in range(cuts)]
        else:
            far = [one != two or sender.leaves_node] * cuts
        table[:, one, two, 1:-1] = np.where(np.array(far, dtype=bool)[:, None], far_s, near_s)
    return table


def _send_s(size_bytes: float, side: StageGroup, crosses: bool) -> float:
    at_once = gcd(side.node_gpus, side.gpus)
    return float(send_s(np.array(size_bytes), np.array(crosses), side.hardware, at_once))
