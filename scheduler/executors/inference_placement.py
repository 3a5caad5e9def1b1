"""Where the inference of a local cluster sits: there it is a demand signal, not processes."""

from __future__ import annotations

import math
from collections.abc import Collection

from scheduler.domain.fleet import PoolKind
from scheduler.domain.observation import NodeFacts
from scheduler.domain.snapshot import Snapshot


def node_facts(desired: Snapshot, *, down: Collection[str]) -> dict[str, NodeFacts]:
    """Every node of `desired`, with the GPUs that its pool's demand takes.

    The demand fills the pool's nodes that are up and not lent, by name, so that the last ones fall idle first; what
    does not fit serves nowhere. A node is free of inference the moment it is offered.
    """
    left = {pool: math.ceil(reading.gpus) for pool, reading in desired.demand.items()}
    facts = {}
    for name, node in sorted(desired.nodes.items()):
        loan = desired.loans.get(name)
        serves = desired.pools[node.pool].kind is PoolKind.INFERENCE and not (loan is not None and loan.is_live)
        taken = min(node.gpus, left.get(node.pool, 0)) if serves and name not in down else 0
        left[node.pool] = left.get(node.pool, 0) - taken
        facts[name] = NodeFacts(up=name not in down, inference_gpus=taken)
    return facts
