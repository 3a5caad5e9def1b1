"""Membership of cluster nodes in Pools, and the commands that bring the fleet's nodes in line with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from scheduler.domain.commands import AddNode, ChangeNode, CommandBody, CordonNode, RemoveNode, UncordonNode
from scheduler.domain.fleet import Node, PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import GPU_MEMORY_LABEL, LENDABLE_GPUS_LABEL
from scheduler.kubernetes.gpu_labels import GpuModel, GpuSharing, NodeGpus, find_gpu_model
from scheduler.kubernetes.node_view import find_untolerated_taints
from scheduler.kubernetes.resources.fleet import ClusterNode, PoolResource, to_fleet_node
from scheduler.kubernetes.resources.meta import CONFLICT, MATCHED, NODES_USABLE, Condition
from scheduler.solver.profiles.catalog import is_estimated_gpu

LISTED_MAX = 10


class NodeProblem(StrEnum):
    """Why a node of a pool cannot run ranks or be lent, most important first. The values are reasons of conditions."""

    UNKNOWN_GPU_MODEL = "UnknownGpuModel"
    GPUS_NOT_WHOLE = "GpusNotWhole"
    WITHOUT_GPUS = "NodesWithoutGpus"
    TAINTS_NOT_TOLERATED = "TaintsNotTolerated"
    LENDABLE_GPUS_INVALID = "LendableGpusInvalid"


_MESSAGES: Mapping[NodeProblem, str] = MappingProxyType(
    {
        NodeProblem.UNKNOWN_GPU_MODEL: (
            "nodes with unknown GPU models: {nodes}; set gpu or the label ebbtide.dev/gpu to a profile name, or the "
            "labels nvidia.com/gpu.product and nvidia.com/gpu.memory, from which a profile is estimated"
        ),
        NodeProblem.GPUS_NOT_WHOLE: (
            "nodes with partitioned or shared GPUs, which cannot run ranks: {nodes}; offer whole GPUs as nvidia.com/gpu"
        ),
        NodeProblem.WITHOUT_GPUS: "nodes without allocatable nvidia.com/gpu: {nodes}",
        NodeProblem.TAINTS_NOT_TOLERATED: (
            "nodes with taints that the pool does not tolerate: {nodes}; add them to tolerations"
        ),
        NodeProblem.LENDABLE_GPUS_INVALID: (
            "nodes that are not lent, because their label ebbtide.dev/lendable-gpus is no number of GPUs from 1 to one "
            "less than the node has: {nodes}; correct the label, or remove it to lend whole nodes"
        ),
    }
)


@dataclass(frozen=True, slots=True)
class PoolMembership:
    """Which nodes belong to which pool, and why others do not.

    Args:
        nodes: the resulting fleet nodes.
        match_counts: number of nodes that the pool's selector matches, by pool.
        conflicts: nodes that an older pool has, with its name, by pool.
        problems: nodes that cannot be used, with the detail to show, by pool and problem.
        estimates: GPU models without a profile, with the one that was estimated from labels, by name of the model.
        assumed_memory: GPU models of nodes without a label for their memory.
    """

    nodes: Mapping[str, Node]
    match_counts: Mapping[str, int]
    conflicts: Mapping[str, Mapping[str, str]]
    problems: Mapping[str, Mapping[NodeProblem, Mapping[str, str]]]
    estimates: Mapping[str, str]
    assumed_memory: frozenset[str]

    def find_nodes_with(self, problem: NodeProblem) -> frozenset[str]:
        return frozenset(name for problems in self.problems.values() for name in problems.get(problem, ()))

    def build_conditions(self, pool: PoolResource) -> Iterator[Condition]:
        name = pool.pool.name
        conflicts = self.conflicts.get(name, {})
        if conflicts:
            listed = _format_list(f"{node} (of Pool {other})" for node, other in sorted(conflicts.items()))
            yield Condition(
                CONFLICT, True, "SelectorsOverlap", f"nodeSelector selects nodes that belong to older Pools: {listed}"
            )
        else:
            yield Condition(CONFLICT, False, "NodesAreItsOwn")
        labels = ", ".join(f"{key}={value}" for key, value in sorted(pool.selector.items()))
        if self.match_counts.get(name):
            yield Condition(MATCHED, True, "NodesFound")
        else:
            yield Condition(
                MATCHED, False, "NoNodeMatches", f"nodeSelector matches no node: no node has the labels {labels}"
            )
        yield self._unusable_condition(name) or self._usable_condition(name)

    def _unusable_condition(self, name: str) -> Condition | None:
        problems = self.problems.get(name, {})
        found = [problem for problem in NodeProblem if problem in problems]
        if not found:
            return None
        parts = (_MESSAGES[problem].format(nodes=_format_nodes(problems[problem])) for problem in found)
        return Condition(NODES_USABLE, False, found[0], "; ".join(parts))

    def _usable_condition(self, name: str) -> Condition:
        memory = {node.gpu: node.gpu_memory_bytes for node in self.nodes.values() if node.pool == name}
        estimated = [gpu for gpu in memory if gpu in self.estimates or is_estimated_gpu(gpu)]
        if not estimated:
            return Condition(NODES_USABLE, True, "GpusKnown")
        listed = ", ".join(self._describe_estimate(gpu, memory[gpu]) for gpu in sorted(estimated))
        return Condition(
            NODES_USABLE,
            True,
            "GpusEstimated",
            f"GPU models without a profile, whose speed is estimated: {listed}. Add profiles to replace the estimates",
        )

    def _describe_estimate(self, gpu: str, memory_bytes: int) -> str:
        size = f"{memory_bytes / 2**30:.4g} GiB of memory"
        return f"{gpu} ({size}, assumed without a label {GPU_MEMORY_LABEL})" if gpu in self.assumed_memory else gpu


@dataclass(frozen=True, slots=True)
class NodeCommands:
    """Commands by name, and the nodes that the cluster cordons."""

    bodies: Mapping[str, CommandBody] = field(default_factory=dict)
    cordoned_nodes: frozenset[str] = frozenset()


def assign_nodes(
    pools: Iterable[PoolResource], machines: Iterable[ClusterNode], snapshot: Snapshot, *, rejected: Collection[str]
) -> PoolMembership:
    """Assign each node to a pool. `pools` are ordered by age, and the oldest matching one gets the node.

    Nodes of `rejected` pools stay there.
    """
    nodes, match_counts, conflicts = dict[str, Node](), Counter[str](), defaultdict[str, dict[str, str]](dict)
    problems: dict[str, dict[NodeProblem, dict[str, str]]] = {}
    models = _GpuModels()
    pools = tuple(pools)
    for cluster_node in machines:
        registered = snapshot.nodes.get(cluster_node.name)
        owner = registered.pool if registered is not None and registered.pool in rejected else ""
        for pool in pools:
            if not pool.matches(cluster_node.labels):
                continue
            name = pool.pool.name
            match_counts[name] += 1
            if owner:
                conflicts[name][cluster_node.name] = owner
                continue
            owner = name
            for problem, detail in _find_problems(cluster_node, pool, models):
                problems.setdefault(name, {}).setdefault(problem, {})[cluster_node.name] = detail
            gpu = models.find(cluster_node, pool)
            if gpu is not None and cluster_node.gpus > 0 and cluster_node.hardware.sharing is GpuSharing.WHOLE:
                nodes[cluster_node.name] = to_fleet_node(cluster_node, pool, gpu)
    used = {node.gpu for node in nodes.values()}
    estimates = {name: text for name, text in models.estimates.items() if name in used}
    assumed_memory = frozenset(models.assumed_memory & used)
    return PoolMembership(nodes, match_counts, conflicts, problems, estimates, assumed_memory)


class _GpuModels:
    """GPU models of one round. Nodes with the same labels are looked up once."""

    def __init__(self) -> None:
        self._found: dict[tuple[NodeGpus, str], GpuModel | None] = {}

    def find(self, cluster_node: ClusterNode, pool: PoolResource) -> GpuModel | None:
        key = (cluster_node.hardware, pool.gpu)
        if key not in self._found:
            self._found[key] = find_gpu_model(cluster_node.hardware, pool_gpu=pool.gpu)
        return self._found[key]

    @property
    def estimates(self) -> dict[str, str]:
        return {model.name: model.estimate for model in self._found.values() if model is not None and model.estimate}

    @property
    def assumed_memory(self) -> set[str]:
        return {model.name for model in self._found.values() if model is not None and model.assumes_memory}


def _find_problems(
    cluster_node: ClusterNode, pool: PoolResource, models: _GpuModels
) -> Iterator[tuple[NodeProblem, str]]:
    """Yield why the node cannot be used, each with the detail to show beside its name."""
    hardware = cluster_node.hardware
    if taints := find_untolerated_taints(cluster_node.taints, pool.tolerations):
        yield NodeProblem.TAINTS_NOT_TOLERATED, f" ({', '.join(map(str, taints))})"
    if cluster_node.gpus < 1:
        yield NodeProblem.WITHOUT_GPUS, ""
    elif hardware.sharing is not GpuSharing.WHOLE:
        yield NodeProblem.GPUS_NOT_WHOLE, f" ({hardware.sharing})"
    elif models.find(cluster_node, pool) is None:
        yield NodeProblem.UNKNOWN_GPU_MODEL, f' ("{pool.gpu or hardware.label}")'
    if pool.pool.kind is PoolKind.INFERENCE and cluster_node.gpus > 0 and cluster_node.count_lendable_gpus() is None:
        yield NodeProblem.LENDABLE_GPUS_INVALID, f' ("{cluster_node.labels[LENDABLE_GPUS_LABEL]}")'


def compute_node_commands(
    membership: PoolMembership,
    machines: Collection[str],
    snapshot: Snapshot,
    *,
    managed: Collection[str],
    previously_cordoned: Collection[str],
) -> NodeCommands:
    """Return commands that register, change, cordon, drain and remove nodes of the `managed` pools.

    A node whose pool, GPU model or number of GPUs changed is removed and registered again, because these are immutable.
    A node without GPUs, for example during a driver update, stays and is cordoned. Only nodes in `previously_cordoned`,
    which were cordoned because of the cluster, are uncordoned with it.
    """
    without_gpus = membership.find_nodes_with(NodeProblem.WITHOUT_GPUS)
    bodies, cordoned = dict[str, CommandBody](), set[str]()
    for name, node in snapshot.nodes.items():
        if node.pool not in managed:
            continue
        member = membership.nodes.get(name)
        stays = name in without_gpus or (member is not None and _hardware_key(member) == _hardware_key(node))
        if not stays:
            cordoned.add(name)
            bodies |= _removal_commands(node, snapshot, exists=name in machines)
        elif member is None or member.cordoned:
            cordoned.add(name)
            if not node.cordoned:
                bodies[f"cordon-{name}"] = CordonNode(name)
        elif node.cordoned and not node.quarantine and name in previously_cordoned:
            bodies[f"uncordon-{name}"] = UncordonNode(name)
        if stays and member is not None and _lending_key(member) != _lending_key(node):
            bodies[f"change-{name}"] = ChangeNode(name, member.lendable, member.lendable_gpus)
    for name, member in membership.nodes.items():
        if name not in snapshot.nodes:
            bodies[f"add-{name}"] = AddNode(member)
            if member.cordoned:
                cordoned.add(name)
    return NodeCommands(bodies, frozenset(cordoned))


def _removal_commands(node: Node, snapshot: Snapshot, *, exists: bool) -> dict[str, CommandBody]:
    """Return the command that drains the node, or removes it once no job holds it and it is not lent."""
    if exists and not node.draining:
        return {f"drain-{node.name}": CordonNode(node.name, drain=True)}
    loan = snapshot.loans.get(node.name)
    is_free = node.name not in snapshot.index.holders and (loan is None or not loan.is_live)
    return {f"remove-{node.name}": RemoveNode(node.name)} if is_free else {}


def _hardware_key(node: Node) -> tuple[str, str, int]:
    """Return the immutable properties.

    Memory is excluded: a new release may correct it, which is no reason to drain nodes.
    """
    return node.pool, node.gpu, node.gpus


def _lending_key(node: Node) -> tuple[bool, tuple[int, ...]]:
    return node.lendable, node.lendable_gpus


def _format_nodes(details: Mapping[str, str]) -> str:
    return _format_list(f"{node}{detail}" for node, detail in sorted(details.items()))


def _format_list(texts: Iterable[str]) -> str:
    names = list(texts)
    return ", ".join(names[:LISTED_MAX]) + (f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else "")
