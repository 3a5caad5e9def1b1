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

    Demand fills nodes that are up and not lent, in name order, so that the last ones become idle first. Excess demand
    is dropped. An offered node is free of inference at once, or once its standby replicas sleep.

    Args:
        standby: what the replicas do that were given orders, by node.
    """
    remaining = {pool: math.ceil(reading.gpus) for pool, reading in desired.demand.items()}
    facts = {}
    for name, node in sorted(desired.nodes.items()):
        loan = desired.loans.get(name)
        serves_inference = desired.pools[node.pool].kind is PoolKind.INFERENCE and not (
            loan is not None and loan.is_in_effect
        )
        used = min(node.gpus, remaining.get(node.pool, 0)) if serves_inference and name not in down else 0
        remaining[node.pool] = remaining.get(node.pool, 0) - used
        replicas = None
        if desired.pools[node.pool].lending.standby is not None:
            replicas = standby.get(name, _UNKNOWN)
            is_offered = loan is not None and loan.state is LoanState.OFFERED
            used = max(used, 1) if is_offered and replicas.phase is not StandbyPhase.ASLEEP else used
        facts[name] = NodeFacts(up=name not in down, inference_gpus=used, standby=replicas)
    return facts


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
