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
        since_s = now_s - WINDOW_S if self._told is None else float("-inf")
        begin = self._last_before(since_s) if self._told is None else self._told
        found = self._after(begin)
        self._told = found[-1].number if found else begin
        return [stored for stored in found if stored.event.at_s >= since_s]

    def _last_before(self, at_s: float) -> int:
        """A number up to which all events are older, a page short of the last at most: found by halving, because a
        store keeps the events of years."""
        low, step = 0, _PAGE
        while self._is_older(low + step, at_s):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > _PAGE:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_older(middle, at_s) else (low, middle)
        return low

    def _is_older(self, number: int, at_s: float) -> bool:
        """Whether the event after this number is from before that time."""
        page = self._store.events(Page(after=number, limit=1))
        return bool(page) and page[0].event.at_s < at_s

    def _after(self, number: int) -> list[StoredEvent]:
        found: list[StoredEvent] = []
        while page := self._store.events(Page(after=number, limit=_PAGE)):
            found.extend(page)
            number = page[-1].number
        return found
