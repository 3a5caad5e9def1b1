"""Waiting for other processes. The generous limit only bounds the duration of failing tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 180.0
PAUSE_S = 0.05


def eventually(ask: Callable[[], T], *, what: str | Callable[[], str], timeout_s: float = PATIENCE_S) -> T:
    """Return the first true result. `what` describes the condition in the error message."""
    limit_s = time.monotonic() + timeout_s
    while not (answer := ask()):
        if time.monotonic() >= limit_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(PAUSE_S)
    return answer
