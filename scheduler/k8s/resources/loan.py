"""Loan: the custom resource that tells of a node in training use. Nobody but us writes one."""

from __future__ import annotations

from typing import Any

from scheduler.domain.loan import Loan
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.kinds import LOAN
from scheduler.k8s.resources.metadata import time_text


def loan_resource(loan: Loan, annotations: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": LOAN.api_version,
        "kind": LOAN.name,
        "metadata": {"name": loan.id, "annotations": annotations},
        "spec": {"node": loan.node, "pool": loan.pool},
    }


def loan_status(loan: Loan, snapshot: Snapshot) -> dict[str, Any]:
    """`usedGpus` and `jobs` tell who is on the node now, those who are leaving it included."""
    node = snapshot.nodes.get(loan.node)
    holders = snapshot.ledger.holders.get(loan.node, {}) if loan.is_live else {}
    status = {
        "state": loan.state.value,
        "stateSince": time_text(loan.state_since_s),
        "offeredAt": time_text(loan.offered_at_s),
        "returnBy": None if loan.return_by_s is None else time_text(loan.return_by_s),
        "gpus": None if node is None else node.gpus,
        "usedGpus": len(holders),
        "jobs": ", ".join(sorted(set(holders.values()))) or None,
    }
    return {name: value for name, value in status.items() if value is not None}
