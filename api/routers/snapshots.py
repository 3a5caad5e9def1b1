"""Snapshots: the whole live state, for `ebbtide replay` and for support."""

from __future__ import annotations

from api.answers.record import SnapshotView, snapshot_view
from api.dependencies import ServiceDep
from api.routing import noun_router

router = noun_router("record")


@router.get("/snapshots/latest")
def get_latest_snapshot(service: ServiceDep) -> SnapshotView:
    """The newest committed snapshot; what waits in the inbox is not in it."""
    return snapshot_view(service.store.load().snapshot)
