"""Which events somebody may see."""

from __future__ import annotations

from collections.abc import Sequence

from api.identity.principal import Principal, Role
from api.streams.event_tail import Told
from scheduler.domain.event import Event, EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Store


def told_to(principal: Principal, store: Store, found: Sequence[Told]) -> list[Told]:
    """Those of the events that `principal` may see. Reads the store."""
    snapshot = store.load().snapshot
    return [each for each in found if may_see(principal, each.event, snapshot, store)]


def may_see(principal: Principal, event: Event, snapshot: Snapshot, store: Store) -> bool:
    """A viewer of a queue is told of it and of its jobs; of nodes, pools and loans only who sees everything."""
    if principal.may(Role.VIEWER):
        return True
    if event.code is EventCode.QUEUE_CHANGED:
        return principal.may(Role.VIEWER, event.subject)
    job = snapshot.jobs.get(event.subject) or store.ended_job(event.subject)
    return job is not None and principal.may(Role.VIEWER, job.spec.queue)
