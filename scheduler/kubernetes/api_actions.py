"""Execution of API actions, in parallel: all of them, or a batch that leaves requests to others.

A failure is logged and does not stop other actions: the next converge computes the missing steps again. Only ambiguous
failures keep a state from counting as converged. Rejected requests changed nothing, so one job over its quota does not
hold up all others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

from scheduler.kubernetes.api_error import ApiError
from scheduler.store.protocol import FencedError

logger = logging.getLogger(__name__)

BATCH_S = 0.25
"""Time after which a batch begins no more actions."""
_BATCH_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ApiAction:
    """API calls that belong together. `description` names them in logs, `requests` is their usual number."""

    description: str
    run: Callable[[], None]
    requests: int = 1


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Numbers of actions of a batch: run, deferred to the next one, and failed with an unknown outcome."""

    run: int
    deferred: int
    ambiguous: int


class ActionPool:
    """A small thread pool: one call takes milliseconds, and a gang needs many.

    `available_requests` returns how many requests the rate limit allows at once.
    """

    def __init__(
        self,
        threads: int = 8,
        *,
        available_requests: Callable[[], float] = lambda: math.inf,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="effect")
        self._available_requests = available_requests
        self._monotonic_s = monotonic_s

    def run_all(self, actions: Iterable[ApiAction]) -> int:
        """Run all actions, in no order, and return the number of ambiguous failures.

        Raises:
            FencedError: a newer leader has written, or this process no longer leads.
        """
        return self._run(list(actions), until_s=math.inf).ambiguous

    def run_batch(self, actions: Iterable[ApiAction], *, seconds: float = BATCH_S) -> BatchResult:
        """Run the first actions, at least one, and defer the others.

        The batch uses at most half of the requests that the rate limit allows at once, and begins actions for
        `seconds`. So it does not wait for the limit, and neither do the requests that follow it.

        Raises:
            FencedError: a newer leader has written, or this process no longer leads.
        """
        listed = list(actions)
        affordable = count_affordable(listed, _BATCH_SHARE * self._available_requests())
        result = self._run(listed[:affordable], until_s=self._monotonic_s() + seconds)
        return replace(result, deferred=len(listed) - result.run)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, actions: Sequence[ApiAction], *, until_s: float) -> BatchResult:
        """Run the actions that can begin before `until_s`, and the first one in any case."""
        limits_s = (until_s if number else math.inf for number in range(len(actions)))
        futures = [
            self._pool.submit(self._begin, action, limit_s) for action, limit_s in zip(actions, limits_s, strict=True)
        ]
        run, ambiguous, fencing_error = 0, 0, None
        for action, future in zip(actions, futures, strict=True):
            try:
                run += future.result()
            except FencedError as error:
                fencing_error = fencing_error or error
            except ApiError as failure:
                run += 1
                ambiguous += failure.had_ambiguous_attempt or failure.is_ambiguous
                logger.warning("%s: %s", action.description, failure)
        if fencing_error is not None:
            raise fencing_error
        return BatchResult(run, len(actions) - run, ambiguous)

    def _begin(self, action: ApiAction, limit_s: float) -> bool:
        """Run the action and return True, or return False if its time is over."""
        if self._monotonic_s() >= limit_s:
            return False
        action.run()
        return True


def count_affordable(actions: Sequence[ApiAction], requests: float) -> int:
    """Return how many of the first actions need at most `requests` together, but at least 1 if there is an action."""
    totals = accumulate(action.requests for action in actions)
    return max(sum(total <= requests for total in totals), min(1, len(actions)))
