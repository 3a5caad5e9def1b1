"""Steps at the API server: which failures leave a doubt, and who may take steps at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.effects import Effect, Effects
from scheduler.store.protocol import FencedError

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


def test_who_leads_no_more_takes_no_further_step() -> None:
    """A converge of many steps may take longer than a Lease lasts, and its end would undo what the next leader does."""
    leading = [True, True, False]
    done: list[str] = []
    effects = Effects(threads=1, may_act=lambda: leading.pop(0) if leading else False)
    steps = [Effect(name, lambda name=name: done.append(name)) for name in ("a", "b", "c", "d")]  # type: ignore[misc]
    with pytest.raises(FencedError, match="c: not done"):
        effects.take(steps)
    assert done == ["a", "b"]
    effects.close()
