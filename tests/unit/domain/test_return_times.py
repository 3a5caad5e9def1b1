"""Measured times of the way back, and the bound on the next one."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.domain.return_times import TIMES_KEPT, LeaveTime, ReturnTimes, bound_next_s, group_leave_times


@pytest.mark.parametrize(
    ("times_s", "bound_s"),
    [((), None), (tuple(range(18)), None), (tuple(range(19)), 18), (tuple(range(39)), 37), (tuple(range(100)), 95)],
)
def test_bound_is_a_rank_of_the_measured_times(times_s: tuple[float, ...], bound_s: float | None) -> None:
    assert bound_next_s(times_s) == bound_s


def test_bound_is_exceeded_in_one_of_twenty() -> None:
    random, exceeded, rounds = Random(7), 0, 4_000
    for _ in range(rounds):
        *known_s, next_s = (random.expovariate(1 / 30.0) for _ in range(41))
        bound_s = bound_next_s(known_s)
        assert bound_s is not None
        exceeded += next_s > bound_s
    assert 0.035 <= exceeded / rounds <= 0.055


def test_only_the_last_times_are_kept() -> None:
    times = ReturnTimes()
    for number in range(TIMES_KEPT + 5):
        times = times.with_leave_time("a", float(number)).with_start(number + 1.0, float(number))
    assert times.leave_times[0] == LeaveTime("a", 5.0)
    assert (len(times.leave_times), len(times.start_times_s), times.newest_start_at_s) == (100, 100, 105.0)


@pytest.mark.parametrize(("ready_at_s", "seconds"), [(50.0, 20.0), (40.0, 20.0), (60.0, 3_601.0), (60.0, -1.0)])
def test_starts_count_once_and_only_if_they_are_plausible(ready_at_s: float, seconds: float) -> None:
    times = ReturnTimes().with_start(50.0, 30.0)
    assert times.with_start(ready_at_s, seconds) is times


def test_a_job_is_known_from_all_pools() -> None:
    measured = {
        "chat": ReturnTimes().with_leave_time("a", 1.0).with_leave_time("b", 2.0),
        "code": ReturnTimes().with_leave_time("a", 3.0),
    }
    assert group_leave_times(measured) == {"a": [1.0, 3.0], "b": [2.0]}
