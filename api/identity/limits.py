"""How often somebody may ask: a token bucket for each, in this process."""

from __future__ import annotations

from dataclasses import dataclass

from api.errors import ProblemError

_KNOWN_MAX = 10_000


@dataclass(slots=True)
class _Bucket:
    level: float
    at_s: float


class RateLimit:
    """Each asker has `burst` requests at once and `rate_per_s` in the long run. Used from one thread."""

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, asker: str, now_s: float, *, cost: float = 1.0) -> float:
        """Take one request's worth; seconds to wait where there is none left (nothing is taken then), else 0."""
        bucket = self._buckets.get(asker)
        if bucket is None:
            self._make_room(now_s)
            bucket = self._buckets[asker] = _Bucket(self._burst, now_s)
        bucket.level = min(self._burst, bucket.level + max(0.0, now_s - bucket.at_s) * self._rate_per_s)
        bucket.at_s = now_s
        if bucket.level < 1.0:
            return (1.0 - bucket.level) / self._rate_per_s
        bucket.level -= cost
        return 0.0

    def _make_room(self, now_s: float) -> None:
        """Who has not asked for so long that the bucket is full again is as good as unknown; else the oldest go."""
        if len(self._buckets) < _KNOWN_MAX:
            return
        full_s = self._burst / self._rate_per_s
        kept = {asker: each for asker, each in self._buckets.items() if now_s - each.at_s < full_s}
        newest = sorted(kept.items(), key=lambda each: each[1].at_s)[-_KNOWN_MAX // 2 :]
        self._buckets = dict(newest)


def slow_down(limit: RateLimit, asker: str, now_s: float, *, cost: float = 1.0) -> None:
    """Raises ProblemError (429) where the asker has no request left."""
    if wait_s := limit.wait_s(asker, now_s, cost=cost):
        headers = {"Retry-After": str(int(wait_s) + 1)}
        raise ProblemError(429, "rate-limited", f"too many requests: ask again in {wait_s:.1f} s", headers=headers)
