"""Use of a node as a whole, in one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from scheduler.domain.fleet import LoanState, Node, NodeState
from scheduler.domain.snapshot import Snapshot

NodeUse = Literal["training", "inference", "idle", "offered", "lent", "recalled", "cordoned", "down"]
_USE_BY_LOAN_STATE: Mapping[LoanState, NodeUse] = {
    LoanState.OFFERED: "offered",
    LoanState.ACTIVE: "lent",
    LoanState.RECALLED: "recalled",
}


def find_node_use(node: Node, snapshot: Snapshot, held: int) -> NodeUse:
    """Return the use of a node of which jobs hold `held` GPUs. A loan in effect takes precedence over a cordon."""
    loan = snapshot.loans.get(node.name)
    if node.state is NodeState.DOWN:
        return "down"
    if loan is not None and loan.is_in_effect:
        return _USE_BY_LOAN_STATE[loan.state]
    if node.cordoned:
        return "cordoned"
    if held:
        return "training"
    return "inference" if node.inference_gpus else "idle"
