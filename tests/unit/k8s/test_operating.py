"""Whether an operator's process should be started anew."""

from __future__ import annotations

from scheduler.k8s.operating import LIVE_S, Pulse


def test_a_loop_lives_as_long_as_it_goes_round() -> None:
    now_s = 0.0
    pulse = Pulse(lambda: (), monotonic_s=lambda: now_s)
    now_s = LIVE_S
    assert pulse.fault() == ""
    now_s = LIVE_S + 1
    assert pulse.fault() == "the loop has not gone round for 121 s"
    pulse.beat()
    assert pulse.fault() == ""


def test_a_loop_whose_helpers_have_died_does_not_live() -> None:
    pulse = Pulse(lambda: ("the watch of pods", "the election"))
    assert pulse.fault() == "has died: the watch of pods, the election"
