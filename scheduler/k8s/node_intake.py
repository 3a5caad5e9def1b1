"""Which node of the cluster is of which Pool, and what has to change of the fleet's nodes for that."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from scheduler.domain.command import AddNode, CommandBody, CordonNode, RemoveNode, UncordonNode
from scheduler.domain.fleet import Node
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.resources.conditions import CONFLICT, MATCHED, NODES_USABLE, Claim
from scheduler.k8s.resources.node import Machine, gpu_of, node_of
from scheduler.k8s.resources.pool import PoolResource
from scheduler.k8s.taints import closing

SHOWN = 10


@dataclass(frozen=True, slots=True)
class Homes:
    """`nodes`: the fleet's nodes as the cluster has them now. By the name of a pool: how many nodes match its selector,
    `taken` those of them that are an older pool's (as node -> pool), `bare` those without GPUs, `unknown` those whose
    GPU model nobody knows (as node -> what it says), `closed` those with taints that the pool does not tolerate."""

    nodes: Mapping[str, Node]
    matched: Mapping[str, int]
    taken: Mapping[str, Mapping[str, str]]
    bare: Mapping[str, Collection[str]]
    unknown: Mapping[str, Mapping[str, str]]
    closed: Mapping[str, Mapping[str, str]]

    def claims(self, pool: PoolResource) -> Iterator[Claim]:
        name = pool.pool.name
        taken, unusable = self.taken.get(name, {}), self._unusable(name)
        if taken:
            shown = _listed(f"{node} (of Pool {other})" for node, other in sorted(taken.items()))
            yield Claim(
                CONFLICT, True, "SelectorsOverlap", f"nodeSelector: selects nodes that older Pools keep: {shown}"
            )
        else:
            yield Claim(CONFLICT, False, "NodesAreItsOwn")
        labels = ", ".join(f"{key}={value}" for key, value in sorted(pool.selector.items()))
        if self.matched.get(name):
            yield Claim(MATCHED, True, "NodesFound")
        else:
            yield Claim(MATCHED, False, "NoNodeMatches", f"nodeSelector: no node bears the labels {labels}")
        yield unusable or Claim(NODES_USABLE, True, "GpusKnown")

    def _unusable(self, name: str) -> Claim | None:
        bare, unknown, closed = self.bare.get(name, ()), self.unknown.get(name, {}), self.closed.get(name, {})
        parts = []
        if unknown:
            shown = _listed(f'{node} ("{product}")' for node, product in sorted(unknown.items()))
            parts.append(f"GPU models that no profile is of: {shown}; set gpu, or the label ebbtide.dev/gpu")
        if bare:
            parts.append(f"nodes without allocatable nvidia.com/gpu: {_listed(sorted(bare))}")
        if closed:
            shown = _listed(f"{node} ({taints})" for node, taints in sorted(closed.items()))
            parts.append(f"nodes with taints on which nothing new starts: {shown}; set tolerations if it is to")
        if not parts:
            return None
        reason = "UnknownGpuModel" if unknown else "NodesWithoutGpus" if bare else "TaintsNotTolerated"
        return Claim(NODES_USABLE, False, reason, "; ".join(parts))


@dataclass(frozen=True, slots=True)
class NodeChanges:
    """`bodies` by what they do. `cordoned`: nodes that the cluster wants cordoned."""

    bodies: Mapping[str, CommandBody] = field(default_factory=dict)
    cordoned: frozenset[str] = frozenset()


def find_homes(
    pools: Iterable[PoolResource], machines: Iterable[Machine], snapshot: Snapshot, *, frozen: Collection[str]
) -> Homes:
    """A home for each node. `pools` come oldest first, and the oldest one keeps a node that several select; nodes of
    `frozen` pools stay there."""
    nodes, matched = dict[str, Node](), dict[str, int]()
    taken, bare, unknown = dict[str, dict[str, str]](), dict[str, set[str]](), dict[str, dict[str, str]]()
    closed: dict[str, dict[str, str]] = {}
    pools = tuple(pools)
    for host in machines:
        known = snapshot.nodes.get(host.name)
        owner = known.pool if known is not None and known.pool in frozen else ""
        for pool in pools:
            if not pool.matches(host.labels):
                continue
            name = pool.pool.name
            matched[name] = matched.get(name, 0) + 1
            if owner:
                taken.setdefault(name, {})[host.name] = owner
                continue
            owner = name
            node = node_of(host, pool)
            taints = closing(host.taints, pool.tolerations)
            if taints:
                closed.setdefault(name, {})[host.name] = ", ".join(map(str, taints))
            if node is not None:
                nodes[host.name] = node
            elif host.gpus < 1:
                bare.setdefault(name, set()).add(host.name)
            elif gpu_of(host, pool) is None:
                unknown.setdefault(name, {})[host.name] = pool.gpu or host.product
    return Homes(nodes, matched, taken, bare, unknown, closed)


def node_changes(
    homes: Homes,
    machines: Collection[str],
    snapshot: Snapshot,
    *,
    managed: Collection[str],
    cordoned_before: Collection[str],
) -> NodeChanges:
    """Nodes to register, to cordon, to drain and to remove, of the pools `managed` alone.

    A node whose pool, GPU model or number of GPUs has changed leaves and joins anew: what it is made of is fixed while
    it is registered. One whose GPUs are gone for now, as while their driver is installed, stays and takes nothing new.
    `cordoned_before` are those that were cordoned because of the cluster: only they are uncordoned with it.
    """
    bare = {name for hosts in homes.bare.values() for name in hosts}
    bodies, cordoned = dict[str, CommandBody](), set[str]()
    for name, node in snapshot.nodes.items():
        if node.pool not in managed:
            continue
        wanted = homes.nodes.get(name)
        stays = name in bare or (wanted is not None and _shape(wanted) == _shape(node))
        if not stays:
            cordoned.add(name)
            bodies |= _leave(node, snapshot, exists=name in machines)
        elif wanted is None or wanted.cordoned:
            cordoned.add(name)
            if not node.cordoned:
                bodies[f"cordon-{name}"] = CordonNode(name)
        elif node.cordoned and name in cordoned_before:
            bodies[f"uncordon-{name}"] = UncordonNode(name)
    for name, wanted in homes.nodes.items():
        if name not in snapshot.nodes:
            bodies[f"add-{name}"] = AddNode(wanted)
            if wanted.cordoned:
                cordoned.add(name)
    return NodeChanges(bodies, frozenset(cordoned))


def _leave(node: Node, snapshot: Snapshot, *, exists: bool) -> dict[str, CommandBody]:
    """Drained first, so that nothing starts there, and removed once nobody holds it and it is home."""
    if exists and not node.draining:
        return {f"drain-{node.name}": CordonNode(node.name, drain=True)}
    loan = snapshot.loans.get(node.name)
    is_free = node.name not in snapshot.ledger.holders and (loan is None or not loan.is_live)
    return {f"remove-{node.name}": RemoveNode(node.name)} if is_free else {}


def _shape(node: Node) -> tuple[str, str, int]:
    """Memory is left out: a newer release may know it better, and the fleet is not drained for that."""
    return node.pool, node.gpu, node.gpus


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")
