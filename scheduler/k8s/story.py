"""Story: the store's events told as Events of the cluster, from where an earlier leader may have left off."""

from __future__ import annotations

from scheduler.k8s.event_log import WINDOW_S, EventLog, record, subjects
from scheduler.k8s.steps import Steps
from scheduler.k8s.writing import World
from scheduler.store.protocol import Page, Store, StoredEvent

_PAGE = 500


class Story:
    """Remembers up to which event it has told. A new one begins a window back: what was told before is found there."""

    def __init__(self, store: Store, *, reporter: str) -> None:
        self._store = store
        self._reporter = reporter
        self._log = EventLog()
        self._told: int | None = None

    def steps(self, world: World) -> tuple[Steps, ...]:
        """What is new since the last time."""
        events = self._new(world.now_s)
        if not events:
            return ()
        known = subjects(world.resources, world.snapshot, job_namespace=world.job_namespace)
        self._log, steps = record(self._log, events, known, reporter=self._reporter)
        return steps

    def _new(self, now_s: float) -> list[StoredEvent]:
        if self._told is None:
            found = list(self._after(0))
            self._told = found[-1].number if found else 0
            return [stored for stored in found if now_s - stored.event.at_s <= WINDOW_S]
        found = list(self._after(self._told))
        self._told = found[-1].number if found else self._told
        return found

    def _after(self, number: int) -> list[StoredEvent]:
        found: list[StoredEvent] = []
        while page := self._store.events(Page(after=number, limit=_PAGE)):
            found.extend(page)
            number = page[-1].number
        return found
