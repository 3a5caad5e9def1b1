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
        taken, unusable = self.conflicts.get(name, {}), self._unusable_condition(name)
        if taken:
            shown = _format_list(f"{node} (of Pool {other})" for node, other in sorted(taken.items()))
            yield Condition(
                CONFLICT, True, "SelectorsOverlap", f"nodeSelector: selects nodes that older Pools keep: {shown}"
            )
        else:
            yield Condition(CONFLICT, False, "NodesAreItsOwn")
        labels = ", ".join(f"{key}={value}" for key, value in sorted(pool.selector.items()))
        if self.match_counts.get(name):
            yield Condition(MATCHED, True, "NodesFound")
        else:
            yield Condition(MATCHED, False, "NoNodeMatches", f"nodeSelector: no node bears the labels {labels}")
        yield unusable or Condition(NODES_USABLE, True, "GpusKnown")

    def _unusable_condition(self, name: str) -> Condition | None:
        bare, unknown, closed = (
            self.without_gpus.get(name, ()),
            self.unknown_gpu_models.get(name, {}),
            self.untolerated_taints.get(name, {}),
        )
        parts = []
        if unknown:
            shown = _format_list(f'{node} ("{product}")' for node, product in sorted(unknown.items()))
            parts.append(f"GPU models that no profile is of: {shown}; set gpu, or the label ebbtide.dev/gpu")
        if bare:
            parts.append(f"nodes without allocatable nvidia.com/gpu: {_format_list(sorted(bare))}")
        if closed:
            shown = _format_list(f"{node} ({taints})" for node, taints in sorted(closed.items()))
            parts.append(f"nodes with taints on which nothing new starts: {shown}; set tolerations if it is to")
        if not parts:
            return None
        reason = "UnknownGpuModel" if unknown else "NodesWithoutGpus" if bare else "TaintsNotTolerated"
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
    nodes, matched = dict[str, Node](), dict[str, int]()
    taken, bare, unknown = dict[str, dict[str, str]](), dict[str, set[str]](), dict[str, dict[str, str]]()
    closed: dict[str, dict[str, str]] = {}
    pools = tuple(pools)
    for host in machines:
        known = snapshot.nodes.get(host.name)
        owner = known.pool if known is not None and known.pool in rejected else ""
        for pool in pools:
            if not pool.matches(host.labels):
                continue
            name = pool.pool.name
            matched[name] = matched.get(name, 0) + 1
            if owner:
                taken.setdefault(name, {})[host.name] = owner
                continue
            owner = name
            node = to_fleet_node(host, pool)
            taints = find_untolerated_taints(host.taints, pool.tolerations)
            if taints:
                closed.setdefault(name, {})[host.name] = ", ".join(map(str, taints))
            if node is not None:
                nodes[host.name] = node
            elif host.gpus < 1:
                bare.setdefault(name, set()).add(host.name)
            elif find_gpu_model(host, pool) is None:
                unknown.setdefault(name, {})[host.name] = pool.gpu or host.product
    return PoolMembership(nodes, matched, taken, bare, unknown, closed)


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
    bare = {name for hosts in membership.without_gpus.values() for name in hosts}
    bodies, cordoned = dict[str, CommandBody](), set[str]()
    for name, node in snapshot.nodes.items():
        if node.pool not in managed:
            continue
        wanted = membership.nodes.get(name)
        stays = name in bare or (wanted is not None and _hardware_key(wanted) == _hardware_key(node))
        if not stays:
            cordoned.add(name)
            bodies |= _removal_commands(node, snapshot, exists=name in machines)
        elif wanted is None or wanted.cordoned:
            cordoned.add(name)
            if not node.cordoned:
                bodies[f"cordon-{name}"] = CordonNode(name)
        elif node.cordoned and name in previously_cordoned:
            bodies[f"uncordon-{name}"] = UncordonNode(name)
    for name, wanted in membership.nodes.items():
        if name not in snapshot.nodes:
            bodies[f"add-{name}"] = AddNode(wanted)
            if wanted.cordoned:
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
    """Return the immutable properties. Memory is excluded: a new release may correct it, which is no reason to drain
    nodes.
    """
    return node.pool, node.gpu, node.gpus


def _format_list(texts: Iterable[str]) -> str:
    every = list(texts)
    return ", ".join(every[:LISTED_MAX]) + (f" and {len(every) - LISTED_MAX} more" if len(every) > LISTED_MAX else "")
