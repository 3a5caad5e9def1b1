"""The day of `ebbtide demo`: its clock, and a surge of demand on request. Only the demo's service has these routes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Request
from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import ContextDep, create_router
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, VIEWER, requires
from scheduler.documents.document import Document
from scheduler.domain.commands import ReportDemand
from scheduler.domain.fleet import PoolKind
from scheduler.domain.snapshot import Snapshot

SURGE_S = 20.0
SURGE_SHARE = 0.95
"""Demand of a surge, as a share of the capacity of each inference pool."""


@dataclass(frozen=True, slots=True)
class DemoTimes:
    """Times of the replayed day and of the last surge in Unix seconds. None: it has not begun, or there was none."""

    started_at_s: float | None = None
    day_s: float = 0.0
    surged_at_s: float | None = None
    surge_until_s: float | None = None


class DemoDay:
    """The times of the demo, which requests of several threads read and change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times = DemoTimes()

    @property
    def times(self) -> DemoTimes:
        return self._times

    def begin(self, started_at_s: float, day_s: float) -> DemoTimes:
        with self._lock:
            self._times = replace(self._times, started_at_s=started_at_s, day_s=day_s)
            return self._times

    def surge(self, now_s: float) -> DemoTimes:
        """Begin a surge, or prolong the one that lasts."""
        with self._lock:
            until_s = self._times.surge_until_s
            lasts = until_s is not None and now_s < until_s
            began_s = self._times.surged_at_s if lasts else now_s
            self._times = replace(self._times, surged_at_s=began_s, surge_until_s=now_s + SURGE_S)
            return self._times


class DemoDocument(Document):
    """The beginning of the replayed day."""

    started_at_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        description="Time at which the replayed day begins, in seconds since 1970 (UTC)."
    )
    day_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        description="Duration of the replayed day, in seconds."
    )


class DemoView(TypedDict):
    """The replayed day and the last surge."""

    now_s: Annotated[float, Field(description="Time of the service, in seconds since 1970 (UTC).")]
    started_at_s: Annotated[
        float | None, Field(description="Beginning of the replayed day, in seconds since 1970 (UTC). Null: not yet.")
    ]
    day_s: Annotated[float, Field(description="Duration of the replayed day, in seconds.")]
    surged_at_s: Annotated[
        float | None, Field(description="Beginning of the last surge, in seconds since 1970 (UTC). Null: none.")
    ]
    surge_until_s: Annotated[
        float | None, Field(description="End of the last surge, in seconds since 1970 (UTC). Null: none.")
    ]
    surge_gpus: Annotated[dict[str, float], Field(description="Demand during a surge, in GPUs, by inference pool.")]


router = create_router("demo")


@router.get("/demo")
@requires(VIEWER)
def get_demo(request: Request, context: ContextDep) -> DemoView:
    """Return the clock of the replayed day and the last surge."""
    return _demo_view(_get_day(request).times, context.snapshot, context.now_s)


@router.put("/demo")
@requires(ADMIN)
def begin_demo_day(document: DemoDocument, request: Request, context: ContextDep) -> DemoView:
    """State when the replayed day begins."""
    declare_audited()
    times = _get_day(request).begin(document.started_at_s, document.day_s)
    return _demo_view(times, context.snapshot, context.now_s)


@router.post("/demo/surge", status_code=202)
@requires(ADMIN)
def begin_surge(request: Request, context: ContextDep) -> DemoView:
    """Raise the demand of all inference pools at once. The demo holds it for 20 s."""
    times = _get_day(request).surge(context.now_s)
    after = context
    for pool, gpus in _compute_surge(context.snapshot).items():
        after = after.send(ReportDemand(pool, gpus))
    return _demo_view(times, after.snapshot, context.now_s)


def _get_day(request: Request) -> DemoDay:
    day: DemoDay = request.app.state.demo
    return day


def _compute_surge(snapshot: Snapshot) -> dict[str, float]:
    """Return the demand of a surge by inference pool."""
    pools = [pool.name for pool in snapshot.pools.values() if pool.kind is PoolKind.INFERENCE]
    return {name: SURGE_SHARE * snapshot.capacity(name) for name in sorted(pools)}


def _demo_view(times: DemoTimes, snapshot: Snapshot, now_s: float) -> DemoView:
    return {
        "now_s": now_s,
        "started_at_s": times.started_at_s,
        "day_s": times.day_s,
        "surged_at_s": times.surged_at_s,
        "surge_until_s": times.surge_until_s,
        "surge_gpus": _compute_surge(snapshot),
    }
