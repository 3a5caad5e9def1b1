"""The way back of lent nodes: measured where enough is known, else declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.return_times import LeaveTime, ReturnTimes
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.way_back import WayBack, measure_way_back, measure_ways_back
from tests.builders import a_fleet, a_job, a_loan, a_snapshot

RULES = LendingPolicy(return_deadline_s=300.0, cold_start_s=240.0)


def leave(job_id: str, *seconds: float) -> tuple[LeaveTime, ...]:
    return tuple(LeaveTime(job_id, each) for each in seconds)


def snapshot_of(
    leave_times: tuple[LeaveTime, ...], starts_s: tuple[float, ...] = (), *, borrower: str = ""
) -> Snapshot:
    fleet = a_fleet(training=1, inference=2, lending=RULES)
    jobs = [a_job(borrower, 8, state=JobState.RUNNING, on={"i0": tuple(range(8))})] if borrower else []
    times = {"inference": ReturnTimes(leave_times, starts_s)}
    return a_snapshot(fleet, jobs, [a_loan("i0")] if borrower else [], return_times=times)


def way_of(snapshot: Snapshot) -> WayBack:
    return measure_way_back(snapshot, snapshot.pools["inference"])


def test_declared_times_hold_until_enough_is_measured() -> None:
    for snapshot in (snapshot_of(()), snapshot_of(leave("a", *[20.0] * 18), (60.0,) * 18, borrower="a")):
        way = way_of(snapshot)
        assert (way.leave_s, way.start_s, way.horizon_s) == (300.0, 240.0, 540.0)


def test_measured_times_shorten_the_horizon() -> None:
    way = way_of(snapshot_of(leave("a", *[20.0] * 19), (60.0,) * 19))
    assert (way.leave_s, way.start_s, way.horizon_s) == (20.0, 60.0, 90.0)


def test_a_start_that_takes_longer_than_declared_lengthens_the_horizon() -> None:
    way = way_of(snapshot_of((), (500.0,) * 19))
    assert (way.leave_s, way.start_s, way.horizon_s) == (300.0, 500.0, 900.0)


@pytest.mark.parametrize(
    ("borrower", "leave_s"),
    [("quick", 10.0), ("slow", 120.0), ("new", 90.0), ("seldom", 140.0)],
)
def test_each_borrower_counts_with_what_is_known_of_it(borrower: str, leave_s: float) -> None:
    """Of 79 times, the bound on the next one is the 76th, which is one of the slow job's."""
    known = (*leave("quick", *[10.0] * 39), *leave("slow", *[90.0] * 37, 120.0, 120.0), *leave("seldom", 140.0))
    assert way_of(snapshot_of(known, borrower=borrower)).leave_s == leave_s


def test_pools_without_own_times_use_those_of_all() -> None:
    snapshot = snapshot_of(())
    pools = {**snapshot.pools, "chat": replace(snapshot.pools["inference"], name="chat")}
    times = {"inference": ReturnTimes(leave("a", *[30.0] * 19))}
    ways = measure_ways_back(replace(snapshot, pools=pools, return_times=times), pools.values())
    assert (ways["chat"].leave_s, ways["chat"].start_s) == (30.0, 240.0)


@given(
    known=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 1e4)), max_size=60),
    starts_s=st.lists(st.floats(0.0, 3_600.0), max_size=30),
    borrower=st.sampled_from(["", "a", "c"]),
)
def test_no_job_has_longer_than_the_deadline(
    known: list[tuple[str, float]], starts_s: list[float], borrower: str
) -> None:
    leave_times = tuple(LeaveTime(job_id, seconds) for job_id, seconds in known)
    way = way_of(snapshot_of(leave_times, tuple(starts_s), borrower=borrower))
    assert way.leave_s <= RULES.return_deadline_s
    assert way.horizon_s >= min(RULES.horizon_s, way.leave_s + way.start_s)


def test_a_way_of_no_known_length_is_the_declared_one() -> None:
    empty: Mapping[str, ReturnTimes] = {}
    assert way_of(replace(snapshot_of(()), return_times=empty)).horizon_s == RULES.horizon_s
