"""The terms of an election; the election itself is tested on a real API server."""

from __future__ import annotations

import pytest

from scheduler.kubernetes.leader_election import LeaseTimings


@pytest.mark.parametrize("terms", [{"lease_s": 7}, {"margin_s": 6.0}, {"retry_s": 6.0}])
def test_terms_under_which_two_could_lead_or_none_are_refused(terms: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="terms need lease_s > renew_s"):
        LeaseTimings(**terms)
