"""The pod agent's connection to the control plane, in a thread of its own.

A slow or absent control plane never blocks a rank: only the newest report is sent, only the newest reply is kept, and
failed requests are retried forever with backoff.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.progress import TOO_MANY_REQUESTS, TooManyRequestsError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_MIN_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_MAX_POLL_PERIOD_S = 10.0
_DETAIL_LENGTH_MAX = 500

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the control plane.

    Attributes:
        report: the report that it answers. Its notice and kill request apply to the generation of that report only.
        sent_at_s: when the report was sent, on the boot clock, which all processes of a machine share.
    """

    report: Report
    document: Mapping[str, Any]
    sent_at_s: float


class ControlPlaneClient:
    """Send reports and receive replies.

    Args:
        read_token: called for each connection.
        wake_fd: receives one byte with each reply.
        reply_wait_s: time that the control plane may wait before it replies. An urgent report interrupts the wait.
    """

    def __init__(
        self, url: str, path: str, *, read_token: Callable[[], str], wake_fd: int, reply_wait_s: float = 0.0
    ) -> None:
        self._url = url
        self._path = urllib.parse.urlsplit(url).path.rstrip("/") + path
        self._read_token = read_token
        self._wake_fd = wake_fd
        self._reply_wait_s = reply_wait_s
        self._is_waiting = self._is_interrupted = False
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._changed = threading.Condition()
        self._report: Report | None = None
        self._is_urgent = False
        self._is_closed = False
        self._delivered: Report | None = None
        self._reply: Reply | None = None
        self._failures, self._answered_at_s = 0, -math.inf
        self._thread = threading.Thread(target=self._run, name="control-plane-client", daemon=True)
        self._thread.start()

    def submit(self, report: Report, *, urgent: bool) -> None:
        """Set the report that is sent next: at once if it is urgent, otherwise with the next poll."""
        with self._changed:
            self._report = report
            if urgent:
                self._is_urgent = True
                self._changed.notify_all()
                self._interrupt()

    def take_reply(self) -> Reply | None:
        """Return the newest reply once, then None."""
        with self._changed:
            reply, self._reply = self._reply, None
            return reply

    def close(self, *, within_s: float) -> bool:
        """Wait until the newest report is delivered, then stop. Return whether it was delivered."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            self._interrupt()
            is_delivered = self._changed.wait_for(lambda: self._delivered is self._report, within_s)
            self._is_closed = True
            self._changed.notify_all()
        return is_delivered

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            with self._changed:
                # After a failure even an urgent report waits for the backoff.
                due_s = time.monotonic() + pause_s
                while not self._is_closed and not self._is_due(due_s):
                    self._changed.wait(max(0.0, due_s - time.monotonic()) if self._report else None)
                if self._is_closed:
                    return
                report, self._is_urgent = self._report, False
            assert report is not None, "no report is due before the first one is submitted"
            pause_s = self._exchange(report)

    def _is_due(self, due_s: float) -> bool:
        if self._report is None:
            return False
        return (self._is_urgent and not self._failures) or time.monotonic() >= due_s

    def _exchange(self, report: Report) -> float:
        """Send one report and return the seconds to wait before the next. Log the first failure and the recovery."""
        sent_at_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            document = self._post({**report, "wait_s": 0.0} if self._is_overdue(sent_at_s) else report)
            pause_s = min(max(0.0, float(document.get("poll_after_s", _MAX_POLL_PERIOD_S))), _MAX_POLL_PERIOD_S)
        except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
            self._disconnect()
            if self._is_interrupted:
                return 0.0
            if not self._failures:
                logger.warning("Cannot reach the control plane at %s; ranks continue: %s", self._url, error)
            self._failures += 1
            backoff_s = min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2.0 ** min(self._failures - 1, 10))
            retry_after_s = error.retry_after_s if isinstance(error, TooManyRequestsError) else 0.0
            return max(retry_after_s, backoff_s * random.uniform(0.5, 1.0))
        if self._failures:
            logger.info("The control plane at %s is reachable again.", self._url)
        self._failures, self._answered_at_s = 0, sent_at_s
        with self._changed:
            self._delivered = report
            self._reply = Reply(report, document, sent_at_s)
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            os.write(self._wake_fd, b"r")
        return pause_s

    def _is_overdue(self, now_s: float) -> bool:
        """Return whether the next reply must not wait, because the last contact was long ago: ranks live by replies.

        That is so at the start, after a failure, and after this process was suspended.
        """
        is_late = now_s - self._answered_at_s > self._reply_wait_s + _TIMEOUT_S
        return bool(self._reply_wait_s and (self._failures or is_late))

    def _post(self, report: Report) -> Mapping[str, Any]:
        """Send the report, reconnecting once if the server had closed an idle connection."""
        was_open = self._connection is not None
        try:
            return self._request(report)
        except (http.client.RemoteDisconnected, ConnectionError):
            if not was_open or self._is_interrupted:
                raise
            self._disconnect()
            return self._request(report)

    def _request(self, report: Report) -> Mapping[str, Any]:
        if self._connection is None:
            self._token = self._read_token()
            self._connection = _open_connection(self._url, timeout_s=self._reply_wait_s + _TIMEOUT_S)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        self._connection.request("POST", self._path, json.dumps(report).encode(), headers)
        with self._changed:
            self._is_waiting, self._is_interrupted = True, False
            if self._is_urgent:
                self._interrupt()
        try:
            answer = self._connection.getresponse()
        finally:
            with self._changed:
                self._is_waiting = False
        body = answer.read()
        if answer.status == TOO_MANY_REQUESTS:
            raise TooManyRequestsError(answer.headers["Retry-After"])
        if answer.status != http.client.OK:
            raise ValueError(f"{answer.status} {body.decode('utf-8', 'replace')[:_DETAIL_LENGTH_MAX]}")
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError(f"expected a JSON object, got {type(document).__name__}")
        return document

    def _interrupt(self) -> None:
        """End the wait for a reply, so that a newer report can be sent. The caller holds the condition."""
        if not self._reply_wait_s or not self._is_waiting:
            return
        if self._connection is not None and self._connection.sock is not None:
            self._is_interrupted = True
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _open_connection(url: str, *, timeout_s: float) -> http.client.HTTPConnection:
    """Connect directly: the control plane is on the cluster's network, which a proxy to the internet cannot reach."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)
