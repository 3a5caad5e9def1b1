"""Setting: what the costs of a layer depend on, beside the layer and its strategy.

What moving bytes between GPUs costs, for many groups of GPUs at once.

A collective takes a start-up time, a hop time for each step, and its bytes over the bandwidth of the slowest hop
(Thakur et al. 2005, section 4). Of the algorithms below the fastest is taken, as NCCL's tuner does
(github.com/NVIDIA/nccl, src/graph/tuning.cc); where the hardware profile has measured times, they are taken instead.

* ring: over all ranks. Ranks that share a node share its network ports: the rings are laid through all of them.
* tree, all-reduce across nodes alone: a chain inside each node and a double binary tree over the nodes.
* hierarchical: across nodes each rank with its counterparts, then inside each node.

`size_bytes` is the whole message: what every rank holds before an all-reduce or an all-to-all, or after an all-gather.

Computing and communicating at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.profiles.hardware_profile import Collective, HardwareProfile


@dataclass(frozen=True, slots=True)
class StageSetting:
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
    def for_stage(
        cls, hardware: HardwareProfile, *, node_gpus: int, gpus: int, global_batch: int, node_gpus_min: int = 0
    ) -> StageSetting:
        """`node_gpus` is that of the cluster: equal nodes; uneven ones count as their greatest common divisor.

        Stages of one width on nodes of unlike size can so be equal settings, and share their costs. `node_gpus_min` is
        the smallest node of a stage that takes all nodes; 0 for any other.
        """
        shared = gcd(node_gpus, gpus)
        return cls(hardware, shared, gpus, global_batch, node_gpus_min or shared)


BoolOrFloatArray = Floats | NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ProcessGroups:
    """Groups of GPUs that talk to each other, all of one kind; every array is [B], one entry a candidate spread.

    Attributes:
        ranks: GPUs in a group; 1 means that there is nothing to send.
        inside: how many of them share a node.
        ports: network ports that a group has in each of its nodes, while its neighbours use theirs.
        node_gpus: GPUs of a node that send at once, those of other groups included.
    """

    ranks: Floats
    ranks_per_node: Floats
    ports_per_node: Floats
    node_gpus: int
    hardware: HardwareProfile

    @classmethod
    def for_ranks(cls, ranks: Ints, stride: Ints, setting: StageSetting, *, spanning: bool = False) -> ProcessGroups:
        """Groups of `ranks` GPUs whose numbers lie `stride` apart.

        Where a node is no multiple of the stride, every hop counts as one between nodes. On uneven nodes `inside` is
        what all have in common; groups that are `spanning` the whole stage use the ports of the smallest share.
        """
        fits, own, least = setting.node_gpus % stride == 0, setting.hardware, setting.node_gpus_min
        inside = np.gcd(ranks, np.maximum(np.where(fits, setting.node_gpus // stride, 1), 1))
        gpus = np.where(fits, np.maximum(inside, least // stride), inside) if spanning else inside
        return cls(ranks.astype(np.float64), inside.astype(np.float64), gpus * own.nics_per_gpu(least), least, own)

    @property
    def nodes(self) -> Floats:
        return self.ranks / self.ranks_per_node


def all_gather_s(size_bytes: Floats, groups: ProcessGroups) -> Floats:
    """Every rank ends with the whole message, of which it had an equal share; [..., B].

    A reduce-scatter is its mirror image at the same cost: adding up is free beside the transfer.
    """
    (ring_s, ring_s_per_byte), (layered_s, layered_s_per_byte) = _cost_ring(groups), _cost_hierarchical(groups)
    time_s = np.minimum(ring_s + size_bytes * ring_s_per_byte, layered_s + size_bytes * layered_s_per_byte)
    return _apply_measured_times(time_s, size_bytes, groups, Collective.ALL_REDUCE, share=0.5)


def all_reduce_s(size_bytes: Floats, groups: ProcessGroups) -> Floats:
    """A reduce-scatter followed by an all-gather, or a tree. Inside a node always the former."""
    time_s = 2 * all_gather_s(size_bytes, groups)
    if (groups.nodes > 1).any():
        tree_s, tree_s_per_byte = _cost_tree(groups)
        time_s = np.minimum(time_s, tree_s + size_bytes * tree_s_per_byte)
    return _apply_measured_times(time_s, size_bytes, groups, Collective.ALL_REDUCE)


def all_to_all_s(size_bytes: Floats, groups: ProcessGroups) -> Floats:
    """Every rank keeps its share and sends an equal one to each other rank, inside the node and then across."""
    own, ranks, inside = groups.hardware, groups.ranks, groups.ranks_per_node
    across = (1 - inside / ranks) / own.network_bandwidth_bytes_per_s(groups.node_gpus)
    s_per_byte = (inside - 1) / ranks / own.intra_bandwidth_bytes_per_s + across
    time_s = _compute_start_s(groups) + _compute_hops_s(groups, inside - 1, groups.nodes - 1) + size_bytes * s_per_byte
    return _apply_measured_times(time_s, size_bytes, groups, Collective.ALL_TO_ALL)


def send_s(size_bytes: Floats, crosses: BoolOrFloatArray, hardware: HardwareProfile, node_gpus: int) -> Floats:
    """One message to one peer; `crosses` is true (or 1) where the peer is in another node. `node_gpus` GPUs of the node
    send at once."""
    inside_s = hardware.intra_latency_s + size_bytes / hardware.intra_bandwidth_bytes_per_s
    across_s = hardware.inter_latency_s + size_bytes / hardware.network_bandwidth_bytes_per_s(node_gpus)
    return np.asarray(np.where(crosses, np.maximum(inside_s, across_s), inside_s))


def _compute_start_s(groups: ProcessGroups) -> Floats:
    own = groups.hardware
    across_s = max(own.intra_latency_s, own.inter_latency_s)
    start_s = np.where(groups.nodes > 1, across_s, own.intra_latency_s)
    return np.asarray(np.where(groups.ranks > 1, start_s, 0.0))


def _compute_hops_s(groups: ProcessGroups, inside: Floats, across: Floats) -> Floats:
    own = groups.hardware
    return inside * own.intra_hop_s + across * max(own.intra_hop_s, own.inter_hop_s)


def _cost_ring(groups: ProcessGroups) -> tuple[Floats, Floats]:
    """All-gather: seconds, and seconds per byte."""
    own = groups.hardware
    ports = np.minimum(own.intra_bandwidth_bytes_per_s, groups.ports_per_node * own.inter_bandwidth_bytes_per_s)
    bytes_per_s = np.where(groups.nodes > 1, ports, own.intra_bandwidth_bytes_per_s)
    hops_s = _compute_hops_s(groups, groups.ranks - groups.nodes, groups.nodes - 1)
    return _compute_start_s(groups) + hops_s, (groups.ranks - 1) / groups.ranks / bytes_per_s


def _cost_hierarchical(groups: ProcessGroups) -> tuple[Floats, Floats]:
    """Hierarchical all-gather: seconds, and seconds per byte."""
    own, inside, nodes = groups.hardware, groups.ranks_per_node, groups.nodes
    hops_s = _compute_hops_s(groups, inside - 1, nodes - 1)
    across = (nodes - 1) / groups.ranks / own.network_bandwidth_bytes_per_s(groups.node_gpus)
    return _compute_start_s(groups) + hops_s, across + (inside - 1) / inside / own.intra_bandwidth_bytes_per_s


def _cost_tree(groups: ProcessGroups) -> tuple[Floats, Floats]:
    """All-reduce: seconds, and seconds per byte; infinite inside a node."""
    own = groups.hardware
    ports = np.minimum(own.intra_bandwidth_bytes_per_s, groups.ports_per_node * own.inter_bandwidth_bytes_per_s)
    hops_s = _compute_hops_s(groups, groups.ranks_per_node - 1, np.ceil(np.log2(groups.nodes)))
    alone = groups.nodes == 1
    return np.where(alone, np.inf, 2 * (_compute_start_s(groups) + hops_s)), np.where(alone, 0.0, 2 / ports)


def _apply_measured_times(
    time_s: Floats, size_bytes: Floats, groups: ProcessGroups, collective: Collective, share: float = 1.0
) -> Floats:
    """`time_s`, but `share` of the measured time where there is a table, and 0 where there is nothing to send."""
    settled_s = np.where(size_bytes > 0, time_s, 0.0)
    for table in groups.hardware.collectives:
        here = np.broadcast_to(groups.ranks == table.ranks, settled_s.shape)
        if table.collective is collective and here.any():
            sizes, seconds = np.array(table.points).T
            wanted = np.broadcast_to(size_bytes, settled_s.shape)[here]
            beyond_s = np.maximum(wanted - sizes[-1], 0) * seconds[-1] / sizes[-1]
            measured_s = share * (np.interp(wanted, sizes, seconds) + beyond_s)
            settled_s[here] = np.where(wanted > 0, measured_s, 0.0)
    return settled_s


def compute_overlapped_s(compute_s: Floats, communicate_s: Floats, coefficient: float) -> Floats:
    """Both at once, each slowed by the coefficient until the shorter one is done (Merak; Galvatron, VLDB'23,
    section 4)."""
    return np.asarray(np.maximum(compute_s, communicate_s) + (coefficient - 1) * np.minimum(compute_s, communicate_s))
