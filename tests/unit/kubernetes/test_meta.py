"""Status conditions."""

from __future__ import annotations

import pytest

from scheduler.kubernetes.resources.meta import Condition, build_status_conditions, find_previous_condition

EARLY, LATE = "1970-01-01T00:00:10Z", "1970-01-01T00:00:20Z"


def test_transition_time_changes_only_with_the_status() -> None:
    first = build_status_conditions(
        [Condition("Scheduled", False, "InsufficientGpus", "2 missing")], None, now_s=10.0, generation=1
    )
    assert first == [
        {
            "type": "Scheduled",
            "status": "False",
            "reason": "InsufficientGpus",
            "message": "2 missing",
            "observedGeneration": 1,
            "lastTransitionTime": EARLY,
        }
    ]
    waits = build_status_conditions(
        [Condition("Scheduled", False, "BehindHeadOfQueue", "x")], first, now_s=20.0, generation=2
    )
    assert (waits[0]["lastTransitionTime"], waits[0]["reason"], waits[0]["observedGeneration"]) == (
        EARLY,
        "BehindHeadOfQueue",
        2,
    )
    placed = build_status_conditions([Condition("Scheduled", True, "Placed")], waits, now_s=20.0, generation=2)
    assert placed[0]["lastTransitionTime"] == LATE


@pytest.mark.parametrize(
    "nonsense", [None, 1, "x", {}, [None, 1, {"type": 3}, {"type": "A"}], [{"type": "A", "status": "True"}]]
)
def test_invalid_previous_conditions_are_ignored(nonsense: object) -> None:
    created = build_status_conditions([Condition("A", True, "R")], nonsense, now_s=10.0, generation=1)
    assert created[0]["lastTransitionTime"] == EARLY
    assert find_previous_condition(nonsense, "A") == ()


def test_find_previous_condition() -> None:
    claim = Condition("Accepted", False, "Refused", "gpus: got nothing")
    assert find_previous_condition(build_status_conditions([claim], None, now_s=1.0, generation=1), "Accepted") == (
        claim,
    )
