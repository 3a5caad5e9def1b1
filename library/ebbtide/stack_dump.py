"""Stacks of all threads on a signal, by which the node agent finds out where a rank hangs."""

from __future__ import annotations

import faulthandler
import signal

_STDERR = 2
_OFFSET = 7


def find_dump_signal() -> int | None:
    """Return the signal that asks a rank for its stacks: a real-time one, which programs rarely use for themselves.

    None where the system has no such signals.
    """
    first = getattr(signal, "SIGRTMIN", None)
    return None if first is None else int(first) + _OFFSET


def register_stack_dump() -> None:
    """Write the stacks of all threads to standard error at each signal, also inside of calls of C code.

    The handler stays until the process ends, because the default action of the signal would end it.
    """
    number = find_dump_signal()
    if number is not None:
        faulthandler.register(number, file=_STDERR, all_threads=True)
