"""The loss of a training as a number, without waiting for the GPU that computes it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

PERIOD_S = 1.0


class LossReader:
    """Reader of the losses of a training, at most one in `PERIOD_S`.

    A loss on a GPU is copied to the host behind the kernels of its step, and read once the copy is there.
    """

    def __init__(self) -> None:
        self._read_at_s = float("-inf")
        self._host: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def read(self, loss: Tensor) -> float | None:
        """Return a loss that was not returned before, or None. `loss` is that of the present step."""
        if self._arrival is not None:
            return self._take_copy(self._arrival)
        now_s = time.monotonic()
        if now_s - self._read_at_s < PERIOD_S:
            return None
        self._read_at_s = now_s
        if not _is_on_gpu(loss):
            return float(loss)
        self._arrival = self._start_copy(loss)
        return None

    def _start_copy(self, loss: Tensor) -> torch.cuda.Event:
        with torch.cuda.device(loss.device):
            if self._host is None:
                self._host = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._host.copy_(loss.reshape(()), non_blocking=True)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            arrival.record()
        return arrival

    def _take_copy(self, arrival: torch.cuda.Event) -> float | None:
        if self._host is None or not arrival.query():  # type: ignore[no-untyped-call]  # torch's
            return None
        self._arrival = None
        return float(self._host)


def _is_on_gpu(loss: Tensor) -> bool:
    """Return whether the loss is a plain tensor on a GPU. Subclasses such as DTensor know how to become a number."""
    return loss.device.type == "cuda" and type(loss) is Tensor
