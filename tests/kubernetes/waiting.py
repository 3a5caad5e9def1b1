"""Waiting for what other processes do. The limit is generous: it only decides how long a failing test takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 180.0
PAUSE_S = 0.05


def eventually(ask: Callable[[], T], *, what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first answer that is true."""
    limit_s = time.monotonic() + timeout_s
    while not (answer := ask()):
        assert time.monotonic() < limit_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(PAUSE_S)
    return answer
