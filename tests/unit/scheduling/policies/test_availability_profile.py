"""AvailabilityProfile: the least share of the free GPUs that meets a deadline."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.scheduling.policies.allotment import Candidate
from scheduler.scheduling.policies.elastic_deadline import AvailabilityProfile
from tests.builders import a_job


def need(steps: float, speeds: dict[int, float]) -> Candidate:
    return Candidate(a_job("j"), np.array([0, *speeds]), np.array([0.0, *speeds.values()]), steps)


LINEAR = {count: float(count) for count in range(1, 9)}


def test_smallest_sufficient_count_is_reserved_until_the_work_is_done() -> None:
    claimed = AvailabilityProfile.constant(8).reserve_share(need(700.0, LINEAR), 200.0)
    assert claimed is not None
    after, now = claimed
    assert now == 4
    assert after.starts_s.tolist() == [0.0, 175.0]
    assert after.free.tolist() == [4, 8]


def test_largest_fitting_count_is_used_while_less_is_free() -> None:
    """4 GPUs for 100 s and 6 after make 400 + 600 steps by 200 s; with at most 5 it would be 900."""
    before = AvailabilityProfile(np.array([0.0, 100.0]), np.array([4, 8]))
    after, now = before.reserve_share(need(1000.0, LINEAR), 200.0) or pytest.fail("it fits")
    assert now == 4
    assert after.starts_s.tolist() == [0.0, 100.0, 200.0]
    assert after.free.tolist() == [0, 2, 8]


def test_unavailable_counts_are_skipped() -> None:
    """3 GPUs are free at first, of which powers of two can use 2: 200 + 4 x 100 steps."""
    before = AvailabilityProfile(np.array([0.0, 100.0]), np.array([3, 8]))
    after, now = before.reserve_share(need(600.0, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}), 200.0) or pytest.fail("it fits")
    assert now == 2
    assert after.free.tolist() == [1, 4, 8]


def test_job_can_start_later() -> None:
    before = AvailabilityProfile(np.array([0.0, 50.0]), np.array([1, 8]))
    after, now = before.reserve_share(need(100.0, {2: 2.0}), 100.0) or pytest.fail("it fits")
    assert now == 0
    assert after.starts_s.tolist() == [0.0, 50.0, 100.0]
    assert after.free.tolist() == [1, 6, 8]


def test_nothing_is_reserved_if_the_largest_count_is_too_small() -> None:
    assert AvailabilityProfile.constant(8).reserve_share(need(1601.0, LINEAR), 200.0) is None
    assert AvailabilityProfile.constant(2).reserve_share(need(401.0, LINEAR), 200.0) is None
    assert AvailabilityProfile.constant(2).reserve_share(need(400.0, LINEAR), 200.0) is not None
