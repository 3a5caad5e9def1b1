"""Stopping on SIGTERM and SIGINT."""

from __future__ import annotations

import os
import signal
import threading


def install_stop_signal() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set from now on. Call it in the main thread.

    A handler must not set the event itself: it interrupts the main thread, which may hold the event's lock because it
    is about to wait for the event, and would then wait for itself. Writing to a pipe takes no lock.
    """
    stop = threading.Event()
    reader, writer = os.pipe()
    threading.Thread(target=_set_after_signal, args=(reader, stop), name="stop-signal", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(writer, b"\0"))
    return stop


def _set_after_signal(reader: int, stop: threading.Event) -> None:
    os.read(reader, 1)
    stop.set()
