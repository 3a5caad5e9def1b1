"""The stop signal arrives whatever the main thread does at that moment."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, time
from scheduler.runtime.stop_signal import install_stop_signal

stop = install_stop_signal()
with stop._cond:  # as the main thread does for a moment in each wait
    signal.raise_signal({number})
assert stop.wait(10)
"""
TIMEOUT_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_that_interrupts_a_wait_is_not_lost(number: signal.Signals) -> None:
    program = PROGRAM.format(number=int(number))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=TIMEOUT_S)
