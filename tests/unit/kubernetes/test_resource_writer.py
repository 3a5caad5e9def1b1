"""ActionPool counts ambiguous failures."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.resource_writer import ActionPool, ApiAction

REFUSED = ApiError(403, "Forbidden", "exceeded quota")
NO_RESPONSE_ERROR = ApiError(0, "ReadTimeoutError", "no answer")


def failing(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_only_missing_responses_are_ambiguous() -> None:
    effects = ActionPool()
    done: list[str] = []
    fine = ApiAction("fine", lambda: done.append("fine"))
    assert effects.run_all([ApiAction("make a pod", failing(REFUSED)), fine]) == 0
    assert effects.run_all([ApiAction("bind a pod", failing(NO_RESPONSE_ERROR)), fine]) == 1
    again = ApiError(409, "Conflict", "it is bound")
    again.had_ambiguous_attempt = True
    assert effects.run_all([ApiAction("bind a pod", failing(again))]) == 1
    assert done == ["fine", "fine"]
    effects.close()
