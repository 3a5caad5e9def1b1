"""Single keys from the terminal, without waiting for Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_keys() -> Iterator[bool]:
    """Deliver keys at once and without an echo during the block. Yields whether there is a terminal to read from.

    Ctrl-C still interrupts.
    """
    if not sys.stdin.isatty():
        yield False
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield True
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def read_keys() -> str:
    """Return the keys that were pressed since the last call, in lower case. Does not wait."""
    terminal = sys.stdin.fileno()
    is_ready = bool(select.select([terminal], [], [], 0)[0])
    return os.read(terminal, 1024).decode(errors="ignore").lower() if is_ready else ""
