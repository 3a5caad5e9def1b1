"""Snapshots: the whole live state, for `ebbtide replay` and for support."""

from __future__ import annotations

from fastapi import APIRouter

from api.dependencies import ServiceDep
from api.views import View
from scheduler.domain.codec import encode

router = APIRouter(prefix="/v1", tags=["record"])


@router.get("/snapshots/latest")
def latest(service: ServiceDep) -> View:
    """The newest committed snapshot; what waits in the inbox is not in it."""
    view: View = encode(service.store.load().snapshot)
    return view
