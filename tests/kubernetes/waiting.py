"""Waiting for what other processes do. The limit is generous: it only decides how long a failing test takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 180.0
PAUSE_S = 0.05


def eventually(ask: Callable[[], T], *, what: str | Callable[[], str], timeout_s: float = PATIENCE_S) -> T:
    """The first answer that is true. `what` is asked for once it did not come, if it can be."""
    limit_s = time.monotonic() + timeout_s
    while not (answer := ask()):
        if time.monotonic() >= limit_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(PAUSE_S)
    return answer
