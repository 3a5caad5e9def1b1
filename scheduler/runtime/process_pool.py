"""ProcessPool: worker processes that never outlive the process that started them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any


def _skip_initialization() -> None:
    """Do nothing: most pools need no initialization."""


class ProcessPool(ProcessPoolExecutor):
    """Pool of spawned processes, started on demand. Each first calls `initialize(*arguments)`.

    The processes exit when this process ends for any reason: each waits for the end of a pipe whose other end only this
    process holds. Without it they would wait for work forever, because each holds the writing end of its own queue.
    If the `with` block raises, including on Ctrl-C, they are ended in the middle of their work.
    """

    def __init__(
        self, processes: int, initialize: Callable[..., None] = _skip_initialization, arguments: tuple[Any, ...] = ()
    ) -> None:
        context = get_context("spawn")
        end, self._lifeline = context.Pipe(duplex=False)
        super().__init__(processes, context, _initialize_process, (end, initialize, arguments))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.kill()

    def kill(self) -> None:
        """End the processes in the middle of their work, and wait for their end."""
        self._lifeline.close()
        self.shutdown(cancel_futures=True)


def _initialize_process(lifeline: Connection, initialize: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C in a terminal signals all its processes. The main process decides how to react.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(lifeline,), name="end-with-parent", daemon=True).start()
    initialize(*arguments)


def _exit_with_parent(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)
