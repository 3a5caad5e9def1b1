"""Whether an operator's process should be started anew."""

from __future__ import annotations

from scheduler.kubernetes.operator_loop import LIVENESS_TIMEOUT_S, Heartbeat


def test_a_loop_lives_as_long_as_it_goes_round() -> None:
    now_s = 0.0
    pulse = Heartbeat(lambda: (), monotonic_s=lambda: now_s)
    now_s = LIVENESS_TIMEOUT_S
    assert pulse.liveness_error() == ""
    now_s = LIVENESS_TIMEOUT_S + 1
    assert pulse.liveness_error() == "the loop has not gone round for 121 s"
    pulse.record()
    assert pulse.liveness_error() == ""


def test_a_loop_whose_helpers_have_died_does_not_live() -> None:
    pulse = Heartbeat(lambda: ("the watch of pods", "the election"))
    assert pulse.liveness_error() == "has died: the watch of pods, the election"
