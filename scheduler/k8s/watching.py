"""Watcher: keeps one mirror like the API server, whatever happens to the connection."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from random import Random

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.client import Cluster
from scheduler.k8s.mirror import Mirror
from scheduler.k8s.pace import backoff_s
from scheduler.k8s.watch_stream import Watch

BACKOFF_BASE_S = 0.2
BACKOFF_CAP_S = 10.0
STOP_S = 2.0

log = logging.getLogger(__name__)


class Watcher:
    """One thread: list, then watch from the list's version, again from where it broke off, and list anew only where
    the server no longer keeps that version.

    A connection can die without a word, and a server sends no bookmarks of a kind that never changed. So it is asked to
    end each watch before `silence_s` are over: silence for longer means that nobody is there, and we connect again.
    That next connection may be as mute, so it begins with a list. `is_stale` after twice that time without contact:
    nobody should decide anything new on such a mirror."""

    def __init__(
        self,
        cluster: Cluster,
        mirror: Mirror,
        *,
        silence_s: float = 30.0,
        rng: Random | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mirror = mirror
        self.lists = 0
        """How often the whole was listed: once, where nothing went wrong."""
        self.watches = 0
        self._cluster = cluster
        self._silence_s = silence_s
        self._rng = rng or Random()
        self._monotonic_s = monotonic_s
        self._contact_at_s = monotonic_s()
        self._failures = 0
        self._since = ""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{mirror.kind.plural}", daemon=True)

    @property
    def is_stale(self) -> bool:
        return self.silent_s > 2 * self._silence_s

    @property
    def silent_s(self) -> float:
        """How long ago the server was last heard."""
        return self._monotonic_s() - self._contact_at_s

    @property
    def has_died(self) -> bool:
        """Its thread has ended, and nobody told it to."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set()

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, join_s: float = STOP_S) -> None:
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
                    self._list()
                self._follow()
            except ApiError as error:
                self._note_failure(error)
            if self._failures:
                pause_s = backoff_s(self._failures, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S, rng=self._rng)
                self._stop.wait(pause_s)

    def _list(self) -> None:
        mirror = self.mirror
        self.lists += 1
        # No patience: this loop has its own, and hears `stop` while it waits.
        listed = self._cluster.list(
            mirror.kind, namespace=mirror.namespace, labels=mirror.labels, fields=mirror.fields, patience_s=0.0
        )
        mirror.replace(listed)
        self._since = listed.resource_version
        self._note_contact()

    def _follow(self) -> None:
        """Until the server ends the watch, which is a sign of life in itself. One that ends early and without a word
        counts as a failure: a server that closes each watch at once is not asked in a hurry."""
        began_s, heard = self._monotonic_s(), 0
        watch = self._open()
        try:
            for event in watch:
                self.mirror.take(event)
                self._since = event.object["metadata"]["resourceVersion"]
                self._note_contact()
                heard += 1
        except ApiError:
            if self.silent_s >= self._silence_s:
                self._since = ""
            raise
        finally:
            with self._lock:
                self._watch = None
        if heard or self._monotonic_s() - began_s > self._silence_s / 2:
            self._note_contact()
        else:
            self._failures += 1

    def _open(self) -> Watch:
        mirror = self.mirror
        self.watches += 1
        watch = self._cluster.watch(
            mirror.kind,
            since=self._since,
            namespace=mirror.namespace,
            labels=mirror.labels,
            fields=mirror.fields,
            timeout_s=0.8 * self._silence_s,
            silence_s=self._silence_s,
        )
        self._contact_at_s = self._monotonic_s()
        with self._lock:
            self._watch = watch
            if self._stop.is_set():
                watch.close()
        return watch

    def _note_contact(self) -> None:
        self._contact_at_s = self._monotonic_s()
        self._failures = 0

    def _note_failure(self, error: ApiError) -> None:
        # The first 410 is no failure of anybody's: the version is simply too old, and a list is due at once.
        was_following = bool(self._since)
        if error.is_gone:
            self._since = ""
        if not (error.is_gone and was_following and not self._failures):
            self._failures += 1
        if not self._stop.is_set():
            log.warning("the watch of %s broke off: %s", self.mirror.kind.plural, error)
