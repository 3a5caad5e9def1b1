"""ProgressPoster: rank 0 tells the control plane how far the job is, and hears its notices in the reply."""

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
from scheduler.worker.notice import Notice, notice_from_json
from scheduler.worker.too_many import STATUS, TooManyError

logger = logging.getLogger(__name__)

_LEAST_PERIOD_S = 1.0
# With nothing new to tell it still asks, because a notice may wait there.
_LONGEST_PERIOD_S = 5.0
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


class ProgressPoster:
    """A background thread, so that a slow or absent control plane never holds the training up."""

    def __init__(self, environment: RankEnvironment) -> None:
        job = urllib.parse.quote(environment.job_id, safe="")
        self._url = f"{environment.url}/v1/jobs/{job}/progress"
        self._token = environment.token
        # The control plane is a neighbour: a proxy for the outer world would not find it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._news = threading.Event()
        self._stop = threading.Event()
        self._progress: Progress | None = None
        self._notice: Notice | None = None
        self._requests = 0
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def tell(self, progress: Progress) -> None:
        self._progress = progress
        self._news.set()

    def pending(self) -> Notice | None:
        return self._notice

    def close(self) -> None:
        """Ends the thread; a request under way is not waited for longer than a moment."""
        self._stop.set()
        self._news.set()
        self._thread.join(timeout=0.5)

    def _run(self) -> None:
        self._news.wait()
        while not self._stop.is_set():
            self._news.clear()
            self._exchange()
            self._stop.wait(_LEAST_PERIOD_S)
            self._news.wait(_LONGEST_PERIOD_S - _LEAST_PERIOD_S)

    def _exchange(self) -> None:
        """One request; a failure is logged when it begins and when it ends, not each second in between."""
        try:
            self._hear(self._post())
        except (OSError, ValueError, http.client.HTTPException) as failure:
            if not self._failing:
                logger.warning("progress is not heard at %s: %s", self._url, failure)
            self._failing = True
            if isinstance(failure, TooManyError):
                self._stop.wait(failure.after_s)
        else:
            if self._failing:
                logger.info("progress is heard again at %s", self._url)
            self._failing = False

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
            if refused.code == STATUS:
                raise TooManyError(refused.headers["Retry-After"]) from None
            raise

    def _hear(self, reply: object) -> None:
        document = reply.get("notice") if isinstance(reply, dict) else None
        if document is None:
            self._notice = None
            return
        heard = notice_from_json(document)
        known = self._notice
        since_s = known.since_s if known is not None else None
        # The same notice comes with every reply, its time running down: that is one request, not many.
        if known is None or (known.action, known.step) != (heard.action, heard.step):
            self._requests += 1
            since_s = time.monotonic()
        self._notice = Notice(heard.action, heard.step, heard.seconds_left, f"reply:{self._requests}", since_s)
