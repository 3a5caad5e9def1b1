"""A run that is being prepared in a thread of the agent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from scheduler.agent.supervised_run import SupervisedRun
from scheduler.domain.run_document import RunDocument

Prepare = Callable[[RunDocument, threading.Event], SupervisedRun]
"""Unpacks the working directory and starts the supervisor, in a thread. A fault of the job is a failed run.

It gives up, also with a failed run, once the event is set.
"""


class Preparation:
    """A preparation in progress, which can be given up."""

    def __init__(self, threads: ThreadPoolExecutor, prepare: Prepare, document: RunDocument) -> None:
        self._cancelled = threading.Event()
        self._future: Future[SupervisedRun] = threads.submit(prepare, document, self._cancelled)

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> SupervisedRun:
        """Return the run of a preparation that is done. Raises what `prepare` raised."""
        return self._future.result()

    def cancel(self) -> None:
        """End the setup command of the run. The preparation is done soon."""
        self._cancelled.set()
