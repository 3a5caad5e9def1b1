"""One look per process at the newest decisions, for all requests of agents that wait for one."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool

from api.agent_state import AgentStateCache
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import Clock

WATCH_PERIOD_S = 0.2


class DecisionWatch:
    """Wakes all waiting requests when a snapshot is committed.

    A look of its own for each waiting request would cost more than everything else that an agent at rest causes.
    Belongs to one event loop.
    """

    def __init__(self, agent_state: AgentStateCache, clock: Clock) -> None:
        self._agent_state = agent_state
        self._clock = clock
        self._waiting = 0
        self._next_change: asyncio.Task[None] | None = None

    async def wait_for_change(self, seen: Snapshot, timeout_s: float) -> Snapshot:
        """Return the newest snapshot as soon as its generation differs from that of `seen`, or after `timeout_s`.

        It may return early. Raises UnavailableError if the store does not respond.
        """
        if self._agent_state.newest_snapshot.generation == seen.generation:
            if self._next_change is None or self._next_change.done():
                self._next_change = asyncio.create_task(self._find_change(seen.generation))
            change = self._next_change
            self._waiting += 1
            try:
                await asyncio.wait({change}, timeout=timeout_s)
            finally:
                self._waiting -= 1
            if change.done():
                change.result()
        return self._agent_state.newest_snapshot

    async def _find_change(self, seen_generation: int) -> None:
        """Wait for a snapshot of another generation. End early if no request waits any more."""
        while self._agent_state.newest_snapshot.generation == seen_generation:
            await asyncio.sleep(WATCH_PERIOD_S)
            if not self._waiting:
                return
            await run_in_threadpool(self._agent_state.snapshot, self._clock.now_s())
