"""Putting steps into effect at the API server: several at a time, each failure told and none of them fatal.

What failed is seen again at the next converge, because steps come from what is missing. So a failure only has to keep
the executor from saying that the state is in effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from scheduler.k8s.api_error import ApiError
from scheduler.store.protocol import FencedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Effect:
    """One step as a call. `what` names it in logs."""

    what: str
    run: Callable[[], None]


class Effects:
    """A small pool of threads: one call takes milliseconds, and a gang has many."""

    def __init__(self, threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="effect")

    def take(self, steps: Iterable[Effect]) -> int:
        """Take all steps, in no order, and wait for them. How many failed.

        Raises:
            FencedError: something is there that a later leader has written.
        """
        listed = list(steps)
        return self._failures(listed, [self._pool.submit(step.run) for step in listed])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _failures(self, steps: Sequence[Effect], running: Sequence[Future[None]]) -> int:
        failures, fenced = 0, None
        for step, future in zip(steps, running, strict=True):
            try:
                future.result()
            except FencedError as later:
                fenced = later
            except ApiError as failure:
                failures += 1
                logger.warning("%s: %s", step.what, failure)
        if fenced is not None:
            raise fenced
        return failures
