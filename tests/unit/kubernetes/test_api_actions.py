"""ActionPool counts ambiguous failures, and batches use half of the requests that the limit allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from scheduler.kubernetes.api_actions import BATCH_S, ActionPool, ApiAction, BatchResult, count_affordable
from scheduler.kubernetes.api_error import ApiError
from scheduler.store.protocol import FencedError

REFUSED = ApiError(403, "Forbidden", "exceeded quota")
NO_RESPONSE_ERROR = ApiError(0, "ReadTimeoutError", "no answer")


def failing(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.fixture
def pool() -> Iterator[ActionPool]:
    pool = ActionPool()
    yield pool
    pool.close()


def test_only_missing_responses_are_ambiguous(pool: ActionPool) -> None:
    done: list[str] = []
    fine = ApiAction("fine", lambda: done.append("fine"))
    assert pool.run_all([ApiAction("make a pod", failing(REFUSED)), fine]) == 0
    assert pool.run_all([ApiAction("bind a pod", failing(NO_RESPONSE_ERROR)), fine]) == 1
    again = ApiError(409, "Conflict", "it is bound")
    again.had_ambiguous_attempt = True
    assert pool.run_all([ApiAction("bind a pod", failing(again))]) == 1
    assert done == ["fine", "fine"]


def test_fenced_action_ends_the_batch_with_its_error(pool: ActionPool) -> None:
    with pytest.raises(FencedError):
        pool.run_batch([ApiAction("bind a pod", failing(FencedError("epoch 2")))])


@pytest.mark.parametrize(
    ("available", "run"), [(100.0, 5), (50.0, 2), (20.0, 1), (19.0, 1), (0.0, 1), (-7.0, 1), (float("inf"), 5)]
)
def test_batch_uses_half_of_the_available_requests_but_runs_at_least_one_action(available: float, run: int) -> None:
    done: list[int] = []
    pool = ActionPool(available_requests=lambda: available)
    actions = [ApiAction(f"start {number}", lambda n=number: done.append(n), requests=10) for number in range(5)]  # type: ignore[misc]
    assert pool.run_batch(actions) == BatchResult(run=run, deferred=5 - run, ambiguous=0)
    assert sorted(done) == list(range(run))
    pool.close()


def test_expensive_action_is_not_overtaken() -> None:
    large, small = ApiAction("large", lambda: None, requests=50), ApiAction("small", lambda: None)
    assert count_affordable([small, large, small], 20.0) == 1
    assert count_affordable([large, small], 20.0) == 1
    assert count_affordable([], 20.0) == 0


def test_slow_server_ends_a_batch_after_its_time() -> None:
    clock_s = [0.0]

    def spend() -> None:
        clock_s[0] += 0.4 * BATCH_S

    pool = ActionPool(1, monotonic_s=lambda: clock_s[0])
    assert pool.run_batch([ApiAction("start", spend)] * 10) == BatchResult(run=3, deferred=7, ambiguous=0)
    assert pool.run_batch([]) == BatchResult(run=0, deferred=0, ambiguous=0)
    pool.close()
