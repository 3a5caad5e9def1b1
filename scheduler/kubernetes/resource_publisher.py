"""ResourcePublisher: writes of custom resources and Events in the background, so that they do not delay ticks.

Resources describe decisions and hold none, so it does no harm that they are written a moment after the tick.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from scheduler.kubernetes.api_actions import ActionPool
from scheduler.kubernetes.event_recorder import EventRecorder
from scheduler.kubernetes.resource_sync import compute_resource_writes
from scheduler.kubernetes.resource_writer import ResourceWriter
from scheduler.kubernetes.resource_writes import PublishState, Writes

logger = logging.getLogger(__name__)


class ResourcePublisher:
    """Publisher of one state after the other. Called by one thread.

    It sends at most half of the requests that the rate limit allows at once. `has_more` tells whether some were left.
    """

    def __init__(self, writer: ResourceWriter, event_recorder: EventRecorder, actions: ActionPool) -> None:
        self._writer = writer
        self._event_recorder = event_recorder
        self._actions = actions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._running: Future[bool] | None = None
        self._next_write = 0
        self.has_more = False

    def is_ready(self) -> bool:
        """Return whether the last state was published.

        Raises:
            FencedError: a newer leader has written.
        """
        if self._running is None:
            return True
        if not self._running.done():
            return False
        finished, self._running = self._running, None
        self.has_more = finished.result() or self._event_recorder.has_more
        return True

    def publish(self, state: PublishState) -> None:
        """Begin to publish the state. The last one must have been published.

        Raises:
            FencedError: a newer leader has written a Pool, Queue, GpuProfile or Loan.
        """
        assert self._running is None, "the last state is still being published"
        writes, events = compute_resource_writes(state), self._event_recorder.build_writes(state)
        self._running = self._thread.submit(self._write, writes, events)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._actions.close()

    def _write(self, writes: Sequence[Writes], events: Sequence[Writes]) -> bool:
        """Write resources in turn, as many as the rate limit allows now, and Events. Return whether some were left."""
        start = self._next_write % len(writes) if writes else 0
        in_turn = (*writes[start:], *writes[:start])
        batch = self._actions.run_batch(self._writer.build_actions(in_turn), seconds=math.inf)
        self._next_write = start + batch.run
        self._actions.run_all(self._writer.build_actions(events))
        return batch.deferred > 0
