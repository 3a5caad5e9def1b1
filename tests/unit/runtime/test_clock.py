"""Clocks never go back."""

from __future__ import annotations

import time

import pytest

from scheduler.runtime.clock import ManualClock, RealClock


def test_a_real_clock_stands_still_while_the_machine_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RealClock()
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert clock.now_s() == 100.0
    monkeypatch.setattr(time, "time", lambda: 50.0)
    assert clock.now_s() == 100.0


def test_a_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock(5.0)
    clock.move_to(7.0)
    assert clock.now_s() == 7.0
    with pytest.raises(ValueError, match=r"it stands at 7.0, asked for 6.0"):
        clock.move_to(6.0)
