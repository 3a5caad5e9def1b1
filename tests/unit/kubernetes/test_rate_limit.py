"""Token bucket and backoff, with a simulated clock."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.kubernetes.flow_control import TokenBucket, compute_backoff_s


def test_burst_is_free_and_further_requests_wait() -> None:
    slept_s: list[float] = []
    bucket = TokenBucket(rate_per_s=10.0, burst=3, monotonic_s=lambda: 5.0, sleep=slept_s.append)
    for _ in range(6):
        bucket.acquire()
    assert slept_s == pytest.approx([0.1, 0.2, 0.3])


def test_unused_tokens_accumulate_up_to_the_burst() -> None:
    now_s, slept_s = [0.0], list[float]()
    bucket = TokenBucket(rate_per_s=10.0, burst=2, monotonic_s=lambda: now_s[0], sleep=slept_s.append)
    now_s[0] = 1_000.0
    for _ in range(3):
        bucket.acquire()
    assert slept_s == pytest.approx([0.1])


@pytest.mark.parametrize(("rate_per_s", "burst"), [(0.0, 1), (1.0, 0)])
def test_invalid_rate_is_rejected(rate_per_s: float, burst: int) -> None:
    with pytest.raises(ValueError, match="rate_per_s must be above 0"):
        TokenBucket(rate_per_s=rate_per_s, burst=burst)


def test_backoff_doubles_up_to_the_cap_with_jitter() -> None:
    for failures, full_s in ((1, 0.2), (2, 0.4), (6, 5.0), (10_000, 5.0)):
        pauses_s = [compute_backoff_s(failures, base_s=0.2, cap_s=5.0, rng=Random(seed)) for seed in range(20)]
        assert all(full_s / 2 <= pause_s <= full_s for pause_s in pauses_s)
        assert len(set(pauses_s)) == 20
