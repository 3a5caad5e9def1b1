"""The processes that solve scaling curves. They end with the controller, however that ends."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process


def solver_pool(processes: int) -> ProcessPoolExecutor:
    """Processes that are started as work comes, with nothing of this one in them."""
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=end_with_parent)


def end_with_parent() -> None:
    """Let this process of a pool end as soon as its parent has.

    By itself it would wait for work for ever after the parent was killed: it holds the writing end of its own queue.
    """
    threading.Thread(target=_wait_and_end, name="end-with-parent", daemon=True).start()


def _wait_and_end() -> None:
    parent = parent_process()
    assert parent is not None, "a pool's process was started by another one"
    parent.join()
    os._exit(1)
