"""Time of collectives and messages between GPUs, for many process groups at once.

A collective takes a start-up time, a time per hop, and its bytes over the bandwidth of the slowest hop (Thakur et al.
2005, section 4). The fastest of these algorithms counts, as in NCCL's tuner (github.com/NVIDIA/nccl,
src/graph/tuning.cc). Measured times in the hardware profile replace the formulas.

* ring: over all ranks. Ranks of a node share its network ports, and the rings use all of these ports.
* tree, for an all-reduce across nodes: a chain within each node and a double binary tree over the nodes.
* hierarchical: across nodes among ranks of the same position, then within each node.

`size_bytes` is the whole message: the bytes that each rank holds before an all-reduce or all-to-all, or after an
all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import numpy as np
from numpy.typing import NDArray

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.profiles.hardware_profile import Collective, HardwareProfile

BoolOrFloatArray = Floats | NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StageSetting:
    """Stages of `gpus` GPUs of one model, in a job with `global_batch` samples per optimizer step.

    Create with `for_stage`.

    GPUs are numbered node by node, and stage i takes the i-th block of them. `node_gpus` is the number of GPUs of a
    stage that share a node wherever the stage lies: the greatest common divisor of the GPUs of a node and of a stage.
    `node_gpus_min` is the smallest number that the stage has in any of its nodes; it is larger if the stage takes all
    GPUs of uneven nodes.
    """

    hardware: HardwareProfile
    node_gpus: int
    gpus: int
    global_batch: int
    node_gpus_min: int
    _hash: int = field(init=False, compare=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._values))

    @property
    def _values(self) -> tuple[HardwareProfile, int, int, int, int]:
        return self.hardware, self.node_gpus, self.gpus, self.global_batch, self.node_gpus_min

    def __hash__(self) -> int:
        """Return the stored hash, because settings are keys of many caches and that of a profile is slow."""
        return self._hash

    def __reduce__(self) -> tuple[type[StageSetting], tuple[HardwareProfile, int, int, int, int]]:
        """Rebuild the hash in the receiving process, because string hashes differ between processes."""
        return StageSetting, self._values

    @classmethod
    def for_stage(
        cls, hardware: HardwareProfile, *, node_gpus: int, gpus: int, global_batch: int, node_gpus_min: int = 0
    ) -> StageSetting:
        """Return the setting for a cluster with `node_gpus` GPUs per node.

        For nodes of different sizes, `node_gpus` is the greatest common divisor.

        Stages of one width on nodes of different sizes can therefore have equal settings and share their costs.

        Args:
            node_gpus_min: GPUs of the smallest node, for a stage that takes all nodes; 0 for any other stage.
        """
        shared = gcd(node_gpus, gpus)
        return cls(hardware, shared, gpus, global_batch, node_gpus_min or shared)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessGroups:
    """Process groups of GPUs, all of one kind; every array is [B], with one entry per candidate.

    Attributes:
        ranks: GPUs in a group; 1 means that there is nothing to send.
        ranks_per_node: GPUs of a group that share a node.
        ports_per_node: network ports that a group has in each of its nodes while its neighbors use theirs.
        node_gpus: GPUs of a node that send at the same time, including those of other groups.
    """

    ranks: Floats
    ranks_per_node: Floats
    ports_per_node: Floats
    node_gpus: int
    hardware: HardwareProfile

    @classmethod
    def for_ranks(cls, ranks: Ints, stride: Ints, setting: StageSetting, *, spanning: bool = False) -> ProcessGroups:
        """Return groups of `ranks` GPUs whose numbers are `stride` apart.

        If the node's GPUs are no multiple of the stride, every hop counts as one between nodes. On uneven nodes,
        `ranks_per_node` is what all nodes have in common; groups that span the whole stage (`spanning`) use the ports
        of the smallest node.
        """
        fits, hardware, least = setting.node_gpus % stride == 0, setting.hardware, setting.node_gpus_min
        inside = np.gcd(ranks, np.maximum(np.where(fits, setting.node_gpus // stride, 1), 1))
        gpus = np.where(fits, np.maximum(inside, least // stride), inside) if spanning else inside
        return cls(
            ranks.astype(np.float64), inside.astype(np.float64), gpus * hardware.nics_per_gpu(least), least, hardware
        )

    @property
    def nodes(self) -> Floats:
        return self.ranks / self.ranks_per_node


def all_gather_s(size_bytes: Floats, groups: ProcessGroups) -> Floats:
    """Return the time [..., B] after which every rank has the whole message, of which each had an equal share.

    A reduce-scatter is the mirror image at the same cost: the additions take no time compared to the transfer.
    """
    (ring_s, ring_s_per_byte), (layered_s, layered_s_per_byte) = _cost_ring(groups), _cost_hierarchical(groups)
    time_s = np.minimum(ring_s + size_bytes * ring_s_per_byte, layered_s + size_bytes * layered_s_per_byte)
    return _apply_measured_times(time_s, size_bytes, groups, Collective.ALL_REDUCE, share=0.5)


def all_reduce_s(size_bytes: Floats, groups: ProcessGroups) -> Floats:
    """Return the time of a reduce-scatter and an all-gather, or of a tree if that is faster across nodes."""
    time_s = 2 * all_gather_s(size_bytes, groups)
    if (groups.nodes > 1).any():
        tree_s, tree_s_per_byte = _cost_tree(groups)
        time_s = np.minimum(time_s, tree_s + size_bytes * tree_s_per_byte)
    return _apply_measured_times(time_s, size_bytes, groups, Collective.ALL_REDUCE)


def all_to_all_s(size_bytes: Floats, groups: ProcessGroups) -> Floats:
    """Return the time in which each rank sends an equal share to every other rank, within the node and then across."""
    hardware, ranks, inside = groups.hardware, groups.ranks, groups.ranks_per_node
    across = (1 - inside / ranks) / hardware.network_bandwidth_bytes_per_s(groups.node_gpus)
    s_per_byte = (inside - 1) / ranks / hardware.intra_bandwidth_bytes_per_s + across
    time_s = _compute_start_s(groups) + _compute_hops_s(groups, inside - 1, groups.nodes - 1) + size_bytes * s_per_byte
    return _apply_measured_times(time_s, size_bytes, groups, Collective.ALL_TO_ALL)


def send_s(size_bytes: Floats, crosses: BoolOrFloatArray, hardware: HardwareProfile, node_gpus: int) -> Floats:
    """Return the time of one message to one peer, while `node_gpus` GPUs of the node send at the same time.

    Args:
        crosses: true (or 1) if the peer is in another node.
    """
    inside_s = hardware.intra_latency_s + size_bytes / hardware.intra_bandwidth_bytes_per_s
    across_s = hardware.inter_latency_s + size_bytes / hardware.network_bandwidth_bytes_per_s(node_gpus)
    return np.asarray(np.where(crosses, np.maximum(inside_s, across_s), inside_s))


def _compute_start_s(groups: ProcessGroups) -> Floats:
    hardware = groups.hardware
    across_s = max(hardware.intra_latency_s, hardware.inter_latency_s)
    start_s = np.where(groups.nodes > 1, across_s, hardware.intra_latency_s)
    return np.asarray(np.where(groups.ranks > 1, start_s, 0.0))


def _compute_hops_s(groups: ProcessGroups, inside: Floats, across: Floats) -> Floats:
    hardware = groups.hardware
    return inside * hardware.intra_hop_s + across * max(hardware.intra_hop_s, hardware.inter_hop_s)


def _cost_ring(groups: ProcessGroups) -> tuple[Floats, Floats]:
    """Return seconds, and seconds per byte, of a ring all-gather."""
    hardware = groups.hardware
    ports = np.minimum(
        hardware.intra_bandwidth_bytes_per_s, groups.ports_per_node * hardware.inter_bandwidth_bytes_per_s
    )
    bytes_per_s = np.where(groups.nodes > 1, ports, hardware.intra_bandwidth_bytes_per_s)
    hops_s = _compute_hops_s(groups, groups.ranks - groups.nodes, groups.nodes - 1)
    return _compute_start_s(groups) + hops_s, (groups.ranks - 1) / groups.ranks / bytes_per_s


def _cost_hierarchical(groups: ProcessGroups) -> tuple[Floats, Floats]:
    """Return seconds, and seconds per byte, of a hierarchical all-gather."""
    hardware, inside, nodes = groups.hardware, groups.ranks_per_node, groups.nodes
    hops_s = _compute_hops_s(groups, inside - 1, nodes - 1)
    across = (nodes - 1) / groups.ranks / hardware.network_bandwidth_bytes_per_s(groups.node_gpus)
    return _compute_start_s(groups) + hops_s, across + (inside - 1) / inside / hardware.intra_bandwidth_bytes_per_s


def _cost_tree(groups: ProcessGroups) -> tuple[Floats, Floats]:
    """Return seconds, and seconds per byte, of a tree all-reduce; infinite within a node."""
    hardware = groups.hardware
    ports = np.minimum(
        hardware.intra_bandwidth_bytes_per_s, groups.ports_per_node * hardware.inter_bandwidth_bytes_per_s
    )
    hops_s = _compute_hops_s(groups, groups.ranks_per_node - 1, np.ceil(np.log2(groups.nodes)))
    alone = groups.nodes == 1
    return np.where(alone, np.inf, 2 * (_compute_start_s(groups) + hops_s)), np.where(alone, 0.0, 2 / ports)


def _apply_measured_times(
    time_s: Floats, size_bytes: Floats, groups: ProcessGroups, collective: Collective, share: float = 1.0
) -> Floats:
    """Return `time_s`, but `share` of the measured time if there is a table, and 0 if there is nothing to send.

    A table for no more ranks than a node has was measured within a node, and says nothing about the network.
    """
    settled_s = np.where(size_bytes > 0, time_s, 0.0)
    for table in groups.hardware.collectives:
        is_measured = (groups.ranks == table.ranks) & ((groups.nodes == 1) | (table.ranks > groups.node_gpus))
        here = np.broadcast_to(is_measured, settled_s.shape)
        if table.collective is collective and here.any():
            sizes, seconds = np.array(table.points).T
            wanted = np.broadcast_to(size_bytes, settled_s.shape)[here]
            beyond_s = np.maximum(wanted - sizes[-1], 0) * seconds[-1] / sizes[-1]
            measured_s = share * (np.interp(wanted, sizes, seconds) + beyond_s)
            settled_s[here] = np.where(wanted > 0, measured_s, 0.0)
    return settled_s


def compute_overlapped_s(compute_s: Floats, communicate_s: Floats, coefficient: float) -> Floats:
    """Return the time of computing and communicating at once.

    Both are slowed by the coefficient until the shorter one ends (Merak; Galvatron, VLDB'23, section 4).
    """
    return np.asarray(np.maximum(compute_s, communicate_s) + (coefficient - 1) * np.minimum(compute_s, communicate_s))
