"""Placement of inference demand on nodes, for executors without real inference pods."""

from __future__ import annotations

import math
from collections.abc import Collection

from scheduler.domain.fleet import Node, PoolKind
from scheduler.domain.observation import NodeFacts, StandbyFacts
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import StandbyPhase

_NO_REPLICAS = StandbyFacts(StandbyPhase.ABSENT, "replicas sleep on Kubernetes only. Set lending.standby to null")


def place_inference(desired: Snapshot, *, down: Collection[str]) -> dict[str, NodeFacts]:
    """Return all nodes of `desired` with the GPUs that inference occupies.

    Demand fills nodes that are up and not lent, in name order, so that the last ones become idle first. Of nodes that
    are lent in part, the GPUs that no loan takes come first, and the others last. Excess demand is dropped. Offered
    GPUs are free of inference at once. Pools with a standby lend nothing, because no replica is observed that could
    sleep.
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
        standby = desired.pools[desired.nodes[name].pool].lending.standby
        facts[name] = NodeFacts(name not in down, gpus, standby=None if standby is None else _NO_REPLICAS)
    return facts


def _count_room(desired: Snapshot, node: Node) -> int:
    """Return the GPUs of a node that inference can use: none of training's, and none that are offered or lent."""
    if desired.pools[node.pool].kind is not PoolKind.INFERENCE:
        return 0
    loan = desired.loans.get(node.name)
    return node.gpus if loan is None or not loan.is_in_effect else loan.count_kept_gpus(node)
