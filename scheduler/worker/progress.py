"""ProgressPoster: rank 0 tells the control plane how far the job is, and hears its notices in the reply.

An answer 429: the control plane asks to be asked less often.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from scheduler.worker.environment import RankEnvironment
from scheduler.worker.notice import Notice, parse_notice

logger = logging.getLogger(__name__)

_MIN_PERIOD_S = 1.0
# With nothing new to tell it still asks, because a notice may wait there.
_MAX_PERIOD_S = 5.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    generation: int
    step: int
    loss: float | None
    samples_per_s: float | None
    checkpoint_step: int | None
    peak_bytes: int | None = None
    frozen_layers: int | None = None


class ProgressReporter:
    """A background thread, so that a slow or absent control plane never holds the training up."""

    def __init__(self, environment: RankEnvironment) -> None:
        job = urllib.parse.quote(environment.job_id, safe="")
        self._url = f"{environment.url}/v1/jobs/{job}/progress"
        self._token = environment.token
        # The control plane is a neighbour: a proxy for the outer world would not find it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._has_update = threading.Event()
        self._stop = threading.Event()
        self._progress: Progress | None = None
        self._notice: Notice | None = None
        self._notice_count = 0
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def submit(self, progress: Progress) -> None:
        self._progress = progress
        self._has_update.set()

    def poll(self) -> Notice | None:
        return self._notice

    def close(self) -> None:
        """Ends the thread; a request under way is not waited for longer than a moment."""
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
        """One request; a failure is logged when it begins and when it ends, not each second in between."""
        try:
            self._handle_reply(self._post())
        except (OSError, ValueError, http.client.HTTPException) as failure:
            if not self._is_failing:
                logger.warning("progress is not heard at %s: %s", self._url, failure)
            self._is_failing = True
            if isinstance(failure, TooManyRequestsError):
                self._stop.wait(failure.retry_after_s)
        else:
            if self._is_failing:
                logger.info("progress is heard again at %s", self._url)
            self._is_failing = False

    def _post(self) -> object:
        progress = self._progress
        assert progress is not None, "the thread wakes only after the first report"
        body = {
            "generation": progress.generation,
            "step": progress.step,
            "loss": progress.loss,
            "samples_per_s": progress.samples_per_s,
            "checkpoint_step": progress.checkpoint_step,
            "peak_bytes": progress.peak_bytes,
            "frozen_layers": progress.frozen_layers,
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as reply:
                return json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as refused:
            if refused.code == TOO_MANY_REQUESTS:
                raise TooManyRequestsError(refused.headers["Retry-After"]) from None
            raise

    def _handle_reply(self, reply: object) -> None:
        document = reply.get("notice") if isinstance(reply, dict) else None
        if document is None:
            self._notice = None
            return
        heard = parse_notice(document)
        known = self._notice
        since_s = known.received_at_s if known is not None else None
        # The same notice comes with every reply, its time running down: that is one request, not many.
        if known is None or (known.action, known.step) != (heard.action, heard.step):
            self._notice_count += 1
            since_s = time.monotonic()
        self._notice = Notice(heard.action, heard.step, heard.seconds_left, f"reply:{self._notice_count}", since_s)


TOO_MANY_REQUESTS = 429
_RETRY_AFTER_MAX_S = 10.0


class TooManyRequestsError(ValueError):
    """`after_s`: how long it asks to be left alone."""

    def __init__(self, retry_after: str | None) -> None:
        self.retry_after_s = (
            min(float(retry_after), _RETRY_AFTER_MAX_S) if retry_after and retry_after.isdigit() else 1.0
        )
        super().__init__(f"{TOO_MANY_REQUESTS}: too many reports, {self.retry_after_s:g} s are waited")
