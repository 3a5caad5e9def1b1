"""A run that is being prepared in a thread of the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from scheduler.agent.supervised_run import SupervisedRun
from scheduler.domain.run_document import RunDocument

Prepare = Callable[[RunDocument, threading.Event], SupervisedRun]
"""Unpacks the working directory and starts the supervisor, in a thread. A fault of the job is a failed run.

It gives up, also with a failed run, once the event is set.
"""

_SETUP_REPORT_S = 2.0
"""Time after which a preparation with a setup command is reported. Most machines have run it before."""


class Preparation:
    """A preparation in progress, which can be given up."""

    def __init__(self, threads: ThreadPoolExecutor, prepare: Prepare, document: RunDocument) -> None:
        self._document = document
        self._began_at_s = time.monotonic()
        self._cancelled = threading.Event()
        self._future: Future[SupervisedRun] = threads.submit(prepare, document, self._cancelled)

    @property
    def setting_up(self) -> int:
        """The generation whose setup command keeps it waiting; 0 if it has none, or may just find it done before."""
        is_slow = time.monotonic() >= self._began_at_s + _SETUP_REPORT_S
        return self._document.generation if self._document.setup and is_slow else 0

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> SupervisedRun:
        """Return the run of a preparation that is done. Raises what `prepare` raised."""
        return self._future.result()

    def cancel(self) -> None:
        """End the setup command of the run. The preparation is done soon."""
        self._cancelled.set()
