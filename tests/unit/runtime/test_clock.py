"""Clocks never go back."""

from __future__ import annotations

import time

import pytest

from scheduler.runtime.clock import ManualClock, RealClock


def machine_at(monkeypatch: pytest.MonkeyPatch, wall_s: float, monotonic_s: float) -> None:
    monkeypatch.setattr(time, "time", lambda: wall_s)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic_s)


def test_a_real_clock_goes_on_more_slowly_until_a_machine_that_was_set_back_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_at(monkeypatch, 100.0, 7.0)
    clock = RealClock()
    assert clock.now_s() == 100.0
    machine_at(monkeypatch, 50.0, 7.0)
    assert clock.now_s() == 100.0
    machine_at(monkeypatch, 150.0, 107.0)
    assert clock.now_s() == pytest.approx(190.0)
    machine_at(monkeypatch, 600.0, 557.0)
    assert clock.now_s() == 600.0


def test_a_real_clock_begins_where_another_one_had_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_at(monkeypatch, 100.0, 7.0)
    clock = RealClock(from_s=130.0)
    machine_at(monkeypatch, 110.0, 17.0)
    assert clock.now_s() == pytest.approx(139.0)
    machine_at(monkeypatch, 500.0, 407.0)
    assert clock.now_s() == 500.0


def test_a_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock(5.0)
    clock.move_to(7.0)
    assert clock.now_s() == 7.0
    with pytest.raises(ValueError, match=r"it stands at 7.0, asked for 6.0"):
        clock.move_to(6.0)
