"""AgentLine: an agent's reports to the control plane and its replies, in a thread of its own.

A slow or absent control plane holds nobody up: the newest report counts, the newest reply is taken when there is one,
and the line tries again for ever.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.worker.progress import TOO_MANY_REQUESTS, TooManyRequestsError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_MIN_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_MAX_POLL_PERIOD_S = 10.0
_DETAIL_LENGTH_MAX = 500

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """`report` is the one that it answers: its notice and its kill are for the ranks of that alone."""

    report: Report
    document: Mapping[str, Any]


class ControlPlaneClient:
    """`wake_fd` gets a byte with each reply; `read_token` is asked for each connection."""

    def __init__(self, url: str, path: str, *, read_token: Callable[[], str], wake_fd: int) -> None:
        self._url = url
        self._path = urllib.parse.urlsplit(url).path.rstrip("/") + path
        self._read_token = read_token
        self._wake_fd = wake_fd
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._changed = threading.Condition()
        self._report: Report | None = None
        self._is_urgent = False
        self._is_closed = False
        self._delivered: Report | None = None
        self._reply: Reply | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="agent-line", daemon=True)
        self._thread.start()

    def submit(self, report: Report, *, urgent: bool) -> None:
        """The report that is sent next: at once where it is urgent, else when it is time to ask again."""
        with self._changed:
            self._report = report
            if urgent:
                self._is_urgent = True
                self._changed.notify_all()

    def take_reply(self) -> Reply | None:
        """The newest reply, once."""
        with self._changed:
            reply, self._reply = self._reply, None
            return reply

    def close(self, *, within_s: float) -> bool:
        """Wait until the newest report has been heard, and end. Whether it was."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            heard = self._changed.wait_for(lambda: self._delivered is self._report, within_s)
            self._is_closed = True
            self._changed.notify_all()
        return heard

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            with self._changed:
                # A failure is not repeated at once, however urgent the news.
                due_s = time.monotonic() + pause_s
                while not self._is_closed and not self._is_due(due_s):
                    self._changed.wait(max(0.0, due_s - time.monotonic()) if self._report else None)
                if self._is_closed:
                    return
                report, self._is_urgent = self._report, False
            assert report is not None, "nothing is due before the first report"
            pause_s = self._exchange(report)

    def _is_due(self, due_s: float) -> bool:
        if self._report is None:
            return False
        return (self._is_urgent and not self._failures) or time.monotonic() >= due_s

    def _exchange(self, report: Report) -> float:
        """One request; how long to wait until the next. A failure is logged when it begins and when it ends."""
        try:
            document = self._post(report)
            pause_s = min(max(0.1, float(document.get("poll_after_s", _MAX_POLL_PERIOD_S))), _MAX_POLL_PERIOD_S)
        except (OSError, ValueError, TypeError, http.client.HTTPException) as failure:
            self._disconnect()
            if not self._failures:
                logger.warning("no assignment from %s, ranks go on: %s", self._url, failure)
            self._failures += 1
            pause_s = min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2.0 ** min(self._failures - 1, 10))
            asked_s = failure.retry_after_s if isinstance(failure, TooManyRequestsError) else 0.0
            return max(asked_s, pause_s * random.uniform(0.5, 1.0))
        if self._failures:
            logger.info("%s answers again", self._url)
        self._failures = 0
        with self._changed:
            self._delivered = report
            self._reply = Reply(report, document)
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            os.write(self._wake_fd, b"r")
        return pause_s

    def _post(self, report: Report) -> Mapping[str, Any]:
        """A connection that was idle may have been closed by the other side: that is no failure yet."""
        was_open = self._connection is not None
        try:
            return self._request(report)
        except (http.client.RemoteDisconnected, ConnectionError):
            if not was_open:
                raise
            self._disconnect()
            return self._request(report)

    def _request(self, report: Report) -> Mapping[str, Any]:
        if self._connection is None:
            self._token = self._read_token()
            self._connection = _open_connection(self._url)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        self._connection.request("POST", self._path, json.dumps(report).encode(), headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status == TOO_MANY_REQUESTS:
            raise TooManyRequestsError(answer.headers["Retry-After"])
        if answer.status != http.client.OK:
            raise ValueError(f"{answer.status} {body.decode('utf-8', 'replace')[:_DETAIL_LENGTH_MAX]}")
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError(f"an object is needed, got {type(document).__name__}")
        return document

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _open_connection(url: str) -> http.client.HTTPConnection:
    """The control plane is a neighbour: no proxy for the outer world is asked."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
