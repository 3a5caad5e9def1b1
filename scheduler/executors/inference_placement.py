"""Placement of inference demand on nodes, for executors without real inference pods."""

from __future__ import annotations

import math
from collections.abc import Collection

from scheduler.domain.fleet import PoolKind
from scheduler.domain.observation import NodeFacts, StandbyFacts
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import StandbyPhase

_NO_REPLICAS = StandbyFacts(StandbyPhase.ABSENT, "replicas sleep on Kubernetes only. Set lending.standby to null")


def place_inference(desired: Snapshot, *, down: Collection[str]) -> dict[str, NodeFacts]:
    """Return all nodes of `desired` with the GPUs that inference occupies.

    Demand fills the GPUs of nodes that are up and not lent, in name order, so that the last ones become idle first.
    Excess demand is dropped. Offered GPUs are free of inference at once. Pools with a standby lend nothing, because no
    replica is observed that could sleep.
    """
    remaining = {pool: math.ceil(reading.gpus) for pool, reading in desired.demand.items()}
    facts = {}
    for name, node in sorted(desired.nodes.items()):
        loan, room = desired.loans.get(name), node.gpus
        if desired.pools[node.pool].kind is not PoolKind.INFERENCE or name in down:
            room = 0
        elif loan is not None and loan.is_in_effect:
            room = loan.count_kept_gpus(node)
        used = min(room, remaining.get(node.pool, 0))
        remaining[node.pool] = remaining.get(node.pool, 0) - used
        standby = _NO_REPLICAS if desired.pools[node.pool].lending.standby is not None else None
        facts[name] = NodeFacts(up=name not in down, inference_gpus=used, standby=standby)
    return facts
