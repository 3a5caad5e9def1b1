"""Liveness of the operator."""

from __future__ import annotations

from scheduler.kubernetes.operator_loop import LIVENESS_TIMEOUT_S, Heartbeat


def test_loop_is_alive_while_it_iterates() -> None:
    now_s = 0.0
    heartbeat = Heartbeat(lambda: (), monotonic_s=lambda: now_s)
    now_s = LIVENESS_TIMEOUT_S
    assert heartbeat.liveness_error() == ""
    now_s = LIVENESS_TIMEOUT_S + 1
    assert "121 s" in heartbeat.liveness_error()
    heartbeat.record()
    assert heartbeat.liveness_error() == ""


def test_dead_threads_fail_liveness() -> None:
    heartbeat = Heartbeat(lambda: ("the watch of pods", "the election"))
    assert "the watch of pods, the election" in heartbeat.liveness_error()
