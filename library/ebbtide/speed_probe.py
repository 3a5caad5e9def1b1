"""A fixed computation on the device of a rank, timed now and then: its speed apart from the training.

Ranks that train together finish each step together, so their step times do not show which of them is slow. The probe
runs between two steps on all ranks at once and waits for no other rank. A device that is throttled, shared or broken
is slow in it; a program that gives its ranks unequal work is not.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from statistics import median
from typing import Any

PERIOD_S = 10.0
WINDOW = 6
_BUFFER, _PASSES = bytes(1 << 20), 8
_MATRIX_SIZE, _PRODUCTS = 2048, 8


class SpeedProbe:
    """The probes of one rank."""

    def __init__(self) -> None:
        self._due_at_s = time.monotonic() + PERIOD_S
        self._recent_s: deque[float] = deque(maxlen=WINDOW)
        self._events: tuple[Any, Any] | None = None

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at_s

    @property
    def median_s(self) -> float | None:
        """Median of the last probes, None before there are WINDOW of them."""
        self._collect()
        return median(self._recent_s) if len(self._recent_s) == WINDOW else None

    def run(self, device: str) -> None:
        """Time the computation on `cpu` or on a GPU such as `cuda:0`. It takes some milliseconds.

        A GPU computes it after the kernels that are launched already, and nothing waits for it.
        """
        self._due_at_s = time.monotonic() + PERIOD_S
        self._collect()
        if device == "cpu":
            self._recent_s.append(_time_on_cpu())
        else:
            self._events = _launch_on_gpu(device)

    def _collect(self) -> None:
        """Record the last probe of a GPU if the GPU has finished it."""
        if self._events is not None and self._events[1].query():
            (start, end), self._events = self._events, None
            self._recent_s.append(float(start.elapsed_time(end)) / 1000.0)


def _time_on_cpu() -> float:
    started_s = time.monotonic()
    digest = hashlib.sha256()
    for _ in range(_PASSES):
        digest.update(_BUFFER)
    return time.monotonic() - started_s


def _launch_on_gpu(device: str) -> tuple[Any, Any]:
    """Return the events before and after the computation.

    The GPU itself measures the time between them, without the kernels before it and the delay of the launch.
    """
    torch = sys.modules["torch"]
    # Events are recorded on the current device, which a script may have left at the first one.
    with torch.no_grad(), torch.cuda.device(device):
        matrix = torch.zeros((_MATRIX_SIZE, _MATRIX_SIZE), dtype=torch.float16, device=device)
        product = torch.mm(matrix, matrix)  # loads the kernel
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix, out=product)
        end.record()
    return start, end
