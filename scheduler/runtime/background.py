"""Background threads of a process, which end with the block that starts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_in_background(run: Callable[[threading.Event], None], stop: threading.Event, *, name: str) -> Iterator[None]:
    """Run `run(stop)` in a thread during the block. Set `stop` at its end and wait for the thread."""
    thread = threading.Thread(target=run, args=(stop,), name=name)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
