"""Membership of cluster nodes in Pools, and the commands that bring the fleet's nodes in line with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from scheduler.domain.commands import AddNode, CommandBody, CordonNode, RemoveNode, UncordonNode
from scheduler.domain.fleet import Node
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.node_view import find_untolerated_taints
from scheduler.kubernetes.resources.fleet import ClusterNode, PoolResource, find_gpu_model, to_fleet_node
from scheduler.kubernetes.resources.meta import CONFLICT, MATCHED, NODES_USABLE, Condition

LISTED_MAX = 10


@dataclass(frozen=True, slots=True)
class PoolMembership:
    """Which nodes belong to which pool, and why others do not.

    `nodes` are the resulting fleet nodes. The others are keyed by pool: `match_counts` of the selector; `conflicts`,
    nodes of an older pool (node to pool); `without_gpus`; `unknown_gpu_models` (node to label); `untolerated_taints`
    (node to taints).
    """

    nodes: Mapping[str, Node]
    match_counts: Mapping[str, int]
    conflicts: Mapping[str, Mapping[str, str]]
    without_gpus: Mapping[str, Collection[str]]
    unknown_gpu_models: Mapping[str, Mapping[str, str]]
    untolerated_taints: Mapping[str, Mapping[str, str]]

    def build_conditions(self, pool: PoolResource) -> Iterator[Condition]:
        name = pool.pool.name
        conflicts, unusable = self.conflicts.get(name, {}), self._unusable_condition(name)
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
        yield unusable or Condition(NODES_USABLE, True, "GpusKnown")

    def _unusable_condition(self, name: str) -> Condition | None:
        without_gpus, unknown_gpu_models, untolerated = (
            self.without_gpus.get(name, ()),
            self.unknown_gpu_models.get(name, {}),
            self.untolerated_taints.get(name, {}),
        )
        parts = []
        if unknown_gpu_models:
            listed = _format_list(f'{node} ("{product}")' for node, product in sorted(unknown_gpu_models.items()))
            parts.append(
                f"nodes with unknown GPU models: {listed}; set gpu or the label ebbtide.dev/gpu to a profile name"
            )
        if without_gpus:
            parts.append(f"nodes without allocatable nvidia.com/gpu: {_format_list(sorted(without_gpus))}")
        if untolerated:
            listed = _format_list(f"{node} ({taints})" for node, taints in sorted(untolerated.items()))
            parts.append(f"nodes with taints that the pool does not tolerate: {listed}; add them to tolerations")
        if not parts:
            return None
        reason = (
            "UnknownGpuModel" if unknown_gpu_models else "NodesWithoutGpus" if without_gpus else "TaintsNotTolerated"
        )
        return Condition(NODES_USABLE, False, reason, "; ".join(parts))


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
    nodes, match_counts = dict[str, Node](), dict[str, int]()
    conflicts, without_gpus, unknown_gpu_models = (
        dict[str, dict[str, str]](),
        dict[str, set[str]](),
        dict[str, dict[str, str]](),
    )
    untolerated: dict[str, dict[str, str]] = {}
    pools = tuple(pools)
    for cluster_node in machines:
        registered = snapshot.nodes.get(cluster_node.name)
        owner = registered.pool if registered is not None and registered.pool in rejected else ""
        for pool in pools:
            if not pool.matches(cluster_node.labels):
                continue
            name = pool.pool.name
            match_counts[name] = match_counts.get(name, 0) + 1
            if owner:
                conflicts.setdefault(name, {})[cluster_node.name] = owner
                continue
            owner = name
            node = to_fleet_node(cluster_node, pool)
            taints = find_untolerated_taints(cluster_node.taints, pool.tolerations)
            if taints:
                untolerated.setdefault(name, {})[cluster_node.name] = ", ".join(map(str, taints))
            if node is not None:
                nodes[cluster_node.name] = node
            elif cluster_node.gpus < 1:
                without_gpus.setdefault(name, set()).add(cluster_node.name)
            elif find_gpu_model(cluster_node, pool) is None:
                unknown_gpu_models.setdefault(name, {})[cluster_node.name] = pool.gpu or cluster_node.product
    return PoolMembership(nodes, match_counts, conflicts, without_gpus, unknown_gpu_models, untolerated)


def compute_node_commands(
    membership: PoolMembership,
    machines: Collection[str],
    snapshot: Snapshot,
    *,
    managed: Collection[str],
    previously_cordoned: Collection[str],
) -> NodeCommands:
    """Return commands that register, cordon, drain and remove nodes of the `managed` pools.

    A node whose pool, GPU model or number of GPUs changed is removed and registered again, because these are immutable.
    A node without GPUs, for example during a driver update, stays and is cordoned. Only nodes in `previously_cordoned`,
    which were cordoned because of the cluster, are uncordoned with it.
    """
    without_gpus = {name for hosts in membership.without_gpus.values() for name in hosts}
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
        elif node.cordoned and name in previously_cordoned:
            bodies[f"uncordon-{name}"] = UncordonNode(name)
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


def _format_list(texts: Iterable[str]) -> str:
    names = list(texts)
    return ", ".join(names[:LISTED_MAX]) + (f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else "")
