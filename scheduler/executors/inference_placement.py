"""Inference on nodes whose executor sees no inference pods: its demand placed on them, and standby replicas at URLs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from scheduler.domain.fleet import Loan, LoanState, Node, PoolKind
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import NodeFacts, StandbyFacts
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import NODE_PLACEHOLDER, Standby, StandbyPhase
from scheduler.executors.standby_replicas import StandbyOrder, StandbyReplica

_NO_FACTS: Mapping[str, StandbyFacts] = {}
_UNKNOWN = StandbyFacts()


def place_inference(
    desired: Snapshot, *, down: Collection[str], standby: Mapping[str, StandbyFacts] = _NO_FACTS
) -> dict[str, NodeFacts]:
    """Return all nodes of `desired` with the GPUs that inference occupies.

    Demand fills nodes that are up and not lent, in name order, so that the last ones become idle first. Of nodes that
    are lent in part, the GPUs that no loan takes come first, and the others last. Excess demand is dropped. Offered
    GPUs are free of inference at once, or once the standby replicas of their node are idle.

    Args:
        standby: what the replicas do that were given orders, by node.
    """
    remaining = {pool: math.ceil(reading.gpus) for pool, reading in desired.demand.items()}
    room = {name: 0 if name in down else _count_room(desired, node) for name, node in sorted(desired.nodes.items())}
    used = dict.fromkeys(room, 0)
    nodes = [desired.nodes[name] for name in room]
    partial = [node for node in nodes if node.lendable_gpus]
    kept = [(node, min(room[node.name], node.gpus - node.loan_gpus)) for node in partial]
    whole = [(node, room[node.name]) for node in nodes if not node.lendable_gpus]
    for node, most in (*kept, *whole, *((node, room[node.name]) for node in partial)):
        added = max(0, min(most - used[node.name], remaining.get(node.pool, 0)))
        used[node.name] += added
        remaining[node.pool] = remaining.get(node.pool, 0) - added
    facts = {}
    for name, gpus in used.items():
        loan, replicas = desired.loans.get(name), None
        if desired.pools[desired.nodes[name].pool].lending.standby is not None:
            replicas = standby.get(name, _UNKNOWN)
            is_offered = loan is not None and loan.state is LoanState.OFFERED
            gpus = max(gpus, 1) if is_offered and replicas.phase is not StandbyPhase.ASLEEP else gpus
        facts[name] = NodeFacts(up=name not in down, inference_gpus=gpus, standby=replicas)
    return facts


def _count_room(desired: Snapshot, node: Node) -> int:
    """Return the GPUs of a node that inference can use: none of training's, and none that are offered or lent."""
    if desired.pools[node.pool].kind is not PoolKind.INFERENCE:
        return 0
    loan = desired.loans.get(node.name)
    return node.gpus if loan is None or not loan.is_in_effect else loan.count_kept_gpus(node)


def plan_engine_orders(desired: Snapshot, *, down: Collection[str]) -> dict[str, StandbyOrder]:
    """Return the order to the engine on each machine that is up, of pools with a standby.

    Engines sleep while the node is on loan, and until no job holds GPUs of it any more.
    """
    policies = {name: pool.lending for name, pool in desired.pools.items() if pool.lending.standby is not None}
    if not policies:
        return {}
    sizes = Counter(node.pool for node in desired.nodes.values())
    return {
        name: _build_order(node, desired.loans.get(name), policies[node.pool], desired, sizes[node.pool])
        for name, node in desired.nodes.items()
        if node.pool in policies and name not in down
    }


def _build_order(
    node: Node, loan: Loan | None, rules: LendingPolicy, desired: Snapshot, pool_size: int
) -> StandbyOrder:
    standby = rules.standby
    assert standby is not None, "orders are for pools with a standby"
    obstacle = _find_obstacle(standby, node, pool_size)
    url = standby.engine_url(node.name)
    engine = StandbyReplica(uid=f"{node.name} {url}", node=node.name, title=f"engine {url}", url=url)
    return StandbyOrder(
        node=node.name,
        standby=standby,
        asleep=(loan is not None and loan.is_in_effect) or bool(desired.index.holders.get(node.name)),
        replicas=() if obstacle else (engine,),
        absence=obstacle,
        is_offered=loan is not None and loan.state is LoanState.OFFERED,
        cold_start_s=rules.cold_start_s,
    )


def _find_obstacle(standby: Standby, node: Node, pool_size: int) -> str:
    """Return why the node cannot be lent with its replica, or an empty string."""
    if not standby.url:
        return "replicas in pods need Kubernetes. Set lending.standby.url for machines"
    if pool_size > 1 and NODE_PLACEHOLDER not in standby.url:
        return f"lending.standby.url names one engine for {pool_size} nodes. Use {NODE_PLACEHOLDER} in it"
    return standby.find_node_obstacle(node.gpus, node.gpu_memory_bytes)
