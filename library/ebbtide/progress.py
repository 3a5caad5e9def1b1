"""Progress reports of rank 0 to the control plane, whose replies carry notices."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace

from ebbtide.environment import RankEnvironment
from ebbtide.notice import Notice, parse_notice
from ebbtide.rank_status import RankStatus

logger = logging.getLogger(__name__)

_MIN_PERIOD_S = 1.0
# An unchanged report is repeated, because the reply may carry a notice.
_MAX_PERIOD_S = 5.0
_TIMEOUT_S = 5.0
TOO_MANY_REQUESTS = 429
_RETRY_AFTER_MAX_S = 10.0


class ProgressReporter:
    """Report progress from a background thread, so that a slow or absent control plane never delays the training."""

    def __init__(self, environment: RankEnvironment) -> None:
        job = urllib.parse.quote(environment.job_id, safe="")
        self._url = f"{environment.url}/v1/jobs/{job}/progress"
        self._token = environment.token
        self._generation = environment.generation
        # The control plane is on the cluster's network: a proxy to the internet could not reach it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._has_update = threading.Event()
        self._stop = threading.Event()
        self._status: RankStatus | None = None
        self._notice: Notice | None = None
        self._notice_count = 0
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def submit(self, status: RankStatus) -> None:
        """Replace the status that the next report carries. Returns at once."""
        self._status = status
        self._has_update.set()

    def poll(self) -> Notice | None:
        """Return the notice of the last reply, or None."""
        return self._notice

    def close(self) -> None:
        """End the thread. A request in flight delays this by half a second at most."""
        self._stop.set()
        self._has_update.set()
        self._thread.join(timeout=0.5)

    def _run(self) -> None:
        self._has_update.wait()
        while not self._stop.is_set():
            self._has_update.clear()
            self._exchange()
            self._stop.wait(_MIN_PERIOD_S)
            self._has_update.wait(_MAX_PERIOD_S - _MIN_PERIOD_S)

    def _exchange(self) -> None:
        """Send one report. Log the first failure and the recovery, not each failure in between."""
        try:
            self._handle_reply(self._post())
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._is_failing:
                logger.warning("Cannot report progress to %s: %s", self._url, error)
            self._is_failing = True
            if isinstance(error, TooManyRequestsError):
                self._stop.wait(error.retry_after_s)
        else:
            if self._is_failing:
                logger.info("Progress reports to %s succeed again.", self._url)
            self._is_failing = False

    def _post(self) -> object:
        status = self._status
        assert status is not None, "the thread wakes only after the first report"
        body = {
            "generation": self._generation,
            "step": status.step,
            "loss": status.loss,
            "samples_per_s": status.samples_per_s,
            "checkpoint_step": status.checkpoint_step,
            "peak_bytes": status.peak_bytes,
            "frozen_layers": status.frozen_layers,
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as reply:
                return json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code == TOO_MANY_REQUESTS:
                raise TooManyRequestsError(error.headers["Retry-After"]) from None
            raise

    def _handle_reply(self, reply: object) -> None:
        document = reply.get("notice") if isinstance(reply, dict) else None
        if document is None:
            self._notice = None
            return
        notice, previous = parse_notice(document), self._notice
        received_at_s = previous.received_at_s if previous is not None else None
        # Every reply repeats the notice with less time left: that is one request, not many.
        if previous is None or (previous.action, previous.step) != (notice.action, notice.step):
            self._notice_count += 1
            received_at_s = time.monotonic()
        self._notice = replace(notice, request_id=f"reply:{self._notice_count}", received_at_s=received_at_s)


class TooManyRequestsError(ValueError):
    """The control plane replied 429 Too Many Requests.

    Attributes:
        retry_after_s: seconds to wait before the next request.
    """

    def __init__(self, retry_after: str | None) -> None:
        self.retry_after_s = (
            min(float(retry_after), _RETRY_AFTER_MAX_S) if retry_after and retry_after.isdigit() else 1.0
        )
        super().__init__(f"{TOO_MANY_REQUESTS} Too Many Requests; retrying in {self.retry_after_s:g} s")
