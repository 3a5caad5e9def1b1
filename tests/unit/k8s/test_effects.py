"""Steps at the API server: which failures leave a doubt."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.effects import Effect, Effects

REFUSED = ApiError(403, "Forbidden", "exceeded quota")
UNHEARD = ApiError(0, "ReadTimeoutError", "no answer")


def failing(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_what_was_refused_is_not_done_and_what_was_not_answered_may_be() -> None:
    effects = Effects()
    done: list[str] = []
    fine = Effect("fine", lambda: done.append("fine"))
    assert effects.take([Effect("make a pod", failing(REFUSED)), fine]) == 0
    assert effects.take([Effect("bind a pod", failing(UNHEARD)), fine]) == 1
    again = ApiError(409, "Conflict", "it is bound")
    again.in_doubt = True
    assert effects.take([Effect("bind a pod", failing(again))]) == 1
    assert done == ["fine", "fine"]
    effects.close()
