"""Names of signals, for people."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 35`: Python names only the first and the last of the real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
