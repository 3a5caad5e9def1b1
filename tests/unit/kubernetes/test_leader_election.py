"""Validation of lease timings. tests/kubernetes covers the election itself."""

from __future__ import annotations

import pytest

from scheduler.kubernetes.leader_election import LeaseTimings


@pytest.mark.parametrize("timings", [{"lease_duration_s": 7}, {"margin_s": 6.0}, {"retry_period_s": 6.0}])
def test_unsafe_lease_timings_are_rejected(timings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="lease_duration_s"):
        LeaseTimings(**timings)
