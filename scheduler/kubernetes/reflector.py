"""Watcher: keeps one mirror like the API server, whatever happens to the connection."""

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
    """One thread: list, then watch from the list's version, again from where it broke off, and list anew only where
    the server no longer keeps that version.

    A connection can die without a word, and a server sends no bookmarks of a kind that never changed. So it is asked to
    end each watch before `silence_s` are over: silence for longer means that nobody is there, and we connect again.
    That next connection may be as mute, so it begins with a list. `is_stale` after twice that time without contact:
    nobody should decide anything new on such a mirror."""

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
        """How often the whole was listed: once, where nothing went wrong."""
        self.watch_count = 0
        self._cluster = cluster
        self._silence_s = idle_timeout_s
        self._rng = rng or Random()
        self._monotonic_s = monotonic_s
        self._contact_at_s = monotonic_s()
        self._failures = 0
        self._since = ""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._watch: WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{cache.kind.plural}", daemon=True)

    @property
    def is_stale(self) -> bool:
        return self.seconds_since_contact > 2 * self._silence_s

    @property
    def seconds_since_contact(self) -> float:
        """How long ago the server was last heard."""
        return self._monotonic_s() - self._contact_at_s

    @property
    def has_died(self) -> bool:
        """Its thread has ended, and nobody told it to."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set()

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, join_s: float = JOIN_TIMEOUT_S) -> None:
        """Returns at once where a watch is read, and after `join_s` at most where the server does not answer: the
        thread then ends with its request, and is a daemon."""
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
        mirror = self.cache
        self.list_count += 1
        # No patience: this loop has its own, and hears `stop` while it waits.
        listed = self._cluster.list(
            mirror.kind,
            namespace=mirror.namespace,
            label_selector=mirror.label_selector,
            field_selector=mirror.field_selector,
            retry_timeout_s=0.0,
        )
        mirror.replace(listed)
        self._since = listed.resource_version
        self._record_contact()

    def _watch_until_closed(self) -> None:
        """Until the server ends the watch, which is a sign of life in itself. One that ends early and without a word
        counts as a failure: a server that closes each watch at once is not asked in a hurry."""
        began_s, heard = self._monotonic_s(), 0
        watch = self._open_watch()
        try:
            for event in watch:
                self.cache.handle_event(event)
                self._since = event.object["metadata"]["resourceVersion"]
                self._record_contact()
                heard += 1
        except ApiError:
            if self.seconds_since_contact >= self._silence_s:
                self._since = ""
            raise
        finally:
            with self._lock:
                self._watch = None
        if heard or self._monotonic_s() - began_s > self._silence_s / 2:
            self._record_contact()
        else:
            self._failures += 1

    def _open_watch(self) -> WatchStream:
        mirror = self.cache
        self.watch_count += 1
        watch = self._cluster.watch(
            mirror.kind,
            resource_version=self._since,
            namespace=mirror.namespace,
            label_selector=mirror.label_selector,
            field_selector=mirror.field_selector,
            timeout_s=0.8 * self._silence_s,
            idle_timeout_s=self._silence_s,
        )
        self._contact_at_s = self._monotonic_s()
        with self._lock:
            self._watch = watch
            if self._stop.is_set():
                watch.close()
        return watch

    def _record_contact(self) -> None:
        self._contact_at_s = self._monotonic_s()
        self._failures = 0

    def _record_failure(self, error: ApiError) -> None:
        # The first 410 is no failure of anybody's: the version is simply too old, and a list is due at once.
        was_following = bool(self._since)
        if error.is_gone:
            self._since = ""
        if not (error.is_gone and was_following and not self._failures):
            self._failures += 1
        if not self._stop.is_set():
            log.warning("the watch of %s broke off: %s", self.cache.kind.plural, error)
