"""Putting steps into effect at the API server: several at a time, each failure told and none of them fatal.

What failed is seen again at the next converge, because steps come from what is missing. What was refused has changed
nothing, so that mirrors show what there is; only what may have been done unseen keeps the executor from saying that the
state is in effect. Otherwise one job whose pods are refused, by a quota say, would keep the GPUs of all others held.
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
        """Take all steps, in no order, and wait for them. How many failed and may have been carried out all the same.

        Raises:
            FencedError: something is there that a later leader has written, or this process leads no more.
        """
        listed = list(steps)
        return self._doubts(listed, [self._pool.submit(step.run) for step in listed])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _doubts(self, steps: Sequence[Effect], running: Sequence[Future[None]]) -> int:
        doubts, fenced = 0, None
        for step, future in zip(steps, running, strict=True):
            try:
                future.result()
            except FencedError as later:
                fenced = fenced or later
            except ApiError as failure:
                doubts += failure.in_doubt or failure.may_have_happened
                logger.warning("%s: %s", step.what, failure)
        if fenced is not None:
            raise fenced
        return doubts
