"""The pace of requests, with a clock and a sleep moved by hand."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.kubernetes.flow_control import TokenBucket, compute_backoff_s


def test_a_burst_is_free_and_then_each_waits_its_turn() -> None:
    slept_s: list[float] = []
    bucket = TokenBucket(rate_per_s=10.0, burst=3, monotonic_s=lambda: 5.0, sleep=slept_s.append)
    for _ in range(6):
        bucket.acquire()
    assert slept_s == pytest.approx([0.1, 0.2, 0.3])


def test_what_was_not_used_is_saved_up_to_the_burst() -> None:
    now_s, slept_s = [0.0], list[float]()
    bucket = TokenBucket(rate_per_s=10.0, burst=2, monotonic_s=lambda: now_s[0], sleep=slept_s.append)
    now_s[0] = 1_000.0
    for _ in range(3):
        bucket.acquire()
    assert slept_s == pytest.approx([0.1])


@pytest.mark.parametrize(("rate_per_s", "burst"), [(0.0, 1), (1.0, 0)])
def test_a_bucket_that_never_fills_is_refused(rate_per_s: float, burst: int) -> None:
    with pytest.raises(ValueError, match="rate_per_s must be above 0"):
        TokenBucket(rate_per_s=rate_per_s, burst=burst)


def test_pauses_double_up_to_the_cap_and_differ_between_those_who_wait() -> None:
    for failures, full_s in ((1, 0.2), (2, 0.4), (6, 5.0), (10_000, 5.0)):
        pauses_s = [compute_backoff_s(failures, base_s=0.2, cap_s=5.0, rng=Random(seed)) for seed in range(20)]
        assert all(full_s / 2 <= pause_s <= full_s for pause_s in pauses_s)
        assert len(set(pauses_s)) == 20
