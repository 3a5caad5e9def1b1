"""Reflector: keeps an ObjectCache in sync with the API server, across connection failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from random import Random

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.client import KubernetesClient, WatchStream
from scheduler.kubernetes.flow_control import compute_backoff_s
from scheduler.kubernetes.object_cache import ObjectCache

BACKOFF_BASE_S = 0.2
BACKOFF_CAP_S = 10.0
JOIN_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class Reflector:
    """A thread that lists, then watches from the version of the list, and resumes after disconnects.

    It lists again only if the version has expired. Dead connections can be silent, and a kind without changes gets no
    bookmarks. So the server is asked to end each watch before `idle_timeout_s`; longer silence is a failure, and the
    next attempt starts with a list. The cache is stale after twice that time, and must not be used for new decisions.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        cache: ObjectCache,
        *,
        idle_timeout_s: float = 30.0,
        rng: Random | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.list_count = 0
        """Number of lists: 1 without failures."""
        self.watch_count = 0
        self._cluster = cluster
        self._idle_timeout_s = idle_timeout_s
        self._rng = rng or Random()
        self._monotonic_s = monotonic_s
        self._last_contact_s = monotonic_s()
        self._failures = 0
        self._since = ""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._watch: WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{cache.kind.plural}", daemon=True)

    @property
    def is_stale(self) -> bool:
        return self.seconds_since_contact > 2 * self._idle_timeout_s

    @property
    def seconds_since_contact(self) -> float:
        """Seconds since the server last responded."""
        return self._monotonic_s() - self._last_contact_s

    @property
    def has_died(self) -> bool:
        """Whether the thread died without `stop`."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set()

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, join_s: float = JOIN_TIMEOUT_S) -> None:
        """Stop the thread.

        Returns at once during a watch, else after at most `join_s`; the daemon thread then ends by itself.
        """
        self._stop.set()
        with self._lock:
            if self._watch is not None:
                self._watch.close()
        if self._thread.is_alive():
            self._thread.join(join_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._since:
                    self._list_objects()
                self._watch_until_closed()
            except ApiError as error:
                self._record_failure(error)
            if self._failures:
                pause_s = compute_backoff_s(self._failures, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S, rng=self._rng)
                self._stop.wait(pause_s)

    def _list_objects(self) -> None:
        cache = self.cache
        self.list_count += 1
        # No retries here: `_run` has its own, and they end with `stop`.
        listed = self._cluster.list(
            cache.kind,
            namespace=cache.namespace,
            label_selector=cache.label_selector,
            field_selector=cache.field_selector,
            retry_timeout_s=0.0,
        )
        cache.replace(listed)
        self._since = listed.resource_version
        self._record_contact()

    def _watch_until_closed(self) -> None:
        """Watch until the server ends the watch.

        A watch that ends early and without events counts as a failure, so that a server that closes every watch is not
        polled in a tight loop.
        """
        started_at_s, event_count = self._monotonic_s(), 0
        watch = self._open_watch()
        try:
            for event in watch:
                self.cache.handle_event(event)
                self._since = event.object["metadata"]["resourceVersion"]
                self._record_contact()
                event_count += 1
        except ApiError:
            if self.seconds_since_contact >= self._idle_timeout_s:
                self._since = ""
            raise
        finally:
            with self._lock:
                self._watch = None
        if event_count or self._monotonic_s() - started_at_s > self._idle_timeout_s / 2:
            self._record_contact()
        else:
            self._failures += 1

    def _open_watch(self) -> WatchStream:
        cache = self.cache
        self.watch_count += 1
        watch = self._cluster.watch(
            cache.kind,
            resource_version=self._since,
            namespace=cache.namespace,
            label_selector=cache.label_selector,
            field_selector=cache.field_selector,
            timeout_s=0.8 * self._idle_timeout_s,
            idle_timeout_s=self._idle_timeout_s,
        )
        self._last_contact_s = self._monotonic_s()
        with self._lock:
            self._watch = watch
            if self._stop.is_set():
                watch.close()
        return watch

    def _record_contact(self) -> None:
        self._last_contact_s = self._monotonic_s()
        self._failures = 0

    def _record_failure(self, error: ApiError) -> None:
        # The first 410 is not a failure: the version has expired and a list follows immediately.
        was_watching = bool(self._since)
        if error.is_gone:
            self._since = ""
        if not (error.is_gone and was_watching and not self._failures):
            self._failures += 1
        if not self._stop.is_set():
            log.warning("watch of %s failed: %s", self.cache.kind.plural, error)
