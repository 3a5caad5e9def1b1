"""Clocks never go back."""

from __future__ import annotations

import time

import pytest

from scheduler.runtime.clock import ManualClock, RealClock


def set_system_clock(monkeypatch: pytest.MonkeyPatch, wall_s: float, monotonic_s: float) -> None:
    monkeypatch.setattr(time, "time", lambda: wall_s)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic_s)


def test_real_clock_slows_down_after_the_system_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_system_clock(monkeypatch, 100.0, 7.0)
    clock = RealClock()
    assert clock.now_s() == 100.0
    set_system_clock(monkeypatch, 50.0, 7.0)
    assert clock.now_s() == 100.0
    set_system_clock(monkeypatch, 150.0, 107.0)
    assert clock.now_s() == pytest.approx(190.0)
    set_system_clock(monkeypatch, 600.0, 557.0)
    assert clock.now_s() == 600.0


def test_real_clock_starts_at_a_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    set_system_clock(monkeypatch, 100.0, 7.0)
    clock = RealClock(from_s=130.0)
    set_system_clock(monkeypatch, 110.0, 17.0)
    assert clock.now_s() == pytest.approx(139.0)
    set_system_clock(monkeypatch, 500.0, 407.0)
    assert clock.now_s() == 500.0


def test_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock(5.0)
    clock.move_to(7.0)
    assert clock.now_s() == 7.0
    with pytest.raises(ValueError, match=r"7\.0.*6\.0"):
        clock.move_to(6.0)
