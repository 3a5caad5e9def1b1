"""ProcessPool: processes for work that takes long, which never outlive the one that started them."""

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
    """What most processes have to settle in."""


class ProcessPool(ProcessPoolExecutor):
    """Processes that are started as work comes, with nothing of this one in them; each calls `settle_in(*arguments)`
    first.

    They end when this process has ended, however that ends: each waits for the end of a pipe whose other end only this
    process holds. By themselves they would wait for work for ever, because each holds the writing end of its own queue.
    A `with` that is left by an error, Ctrl-C among them, ends them in the middle of their work.
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
        if kind is not None:
            self._lifeline.close()
        self.shutdown(cancel_futures=kind is not None)


def _initialize_process(lifeline: Connection, initialize: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C in a terminal reaches every process of it; what follows from it the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(lifeline,), name="end-with-parent", daemon=True).start()
    initialize(*arguments)


def _exit_with_parent(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)
