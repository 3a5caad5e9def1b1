"""Comparison of the policy set in use with "no lending" and "no elasticity", by simulation of recorded jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

DAY_S = 86_400
RECORDED_DAYS = 7
"""Days of recorded jobs that a comparison simulates. Jobs often run for longer than one day."""
RECORDED_S = float(RECORDED_DAYS * DAY_S)
COMPARISON_OWNER_ID = "service:savings"
"""Owner of the simulations that compare, so that they are found for every caller."""
COMPARISON_TITLE = f"Savings of the last {RECORDED_DAYS} days: with, without lending, and without elasticity"


class Variant(StrEnum):
    """TODAY: the policy set in use. The others are derived from it, without lending and without elasticity."""

    TODAY = "today"
    NO_LENDING = "no_lending"
    NO_ELASTICITY = "no_elasticity"


POLICY_BY_VARIANT: Mapping[Variant, str] = {
    Variant.TODAY: "ebbtide",
    Variant.NO_LENDING: "ebbtide-scaling",
    Variant.NO_ELASTICITY: "ebbtide-loaning",
}
COMPARED_POLICIES = tuple(POLICY_BY_VARIANT.values())
_VARIANT_BY_POLICY = {policy: variant for variant, policy in POLICY_BY_VARIANT.items()}


@dataclass(frozen=True, slots=True)
class ComparedOutcome:
    """Results of the simulation under one policy set.

    Args:
        short_ratio: share of demand intervals in which loans left inference short, 0 to 1.
    """

    variant: Variant
    policy: str
    jobs: int
    completed: int
    jct_mean_s: float
    jct_p95_s: float
    waiting_mean_s: float
    makespan_s: float
    loaned_gpu_hours: float
    idle_waiting_gpu_hours: float
    lost_gpu_hours: float
    short_ratio: float


def read_outcomes(report: Mapping[str, Any]) -> tuple[ComparedOutcome, ...]:
    """Return the outcomes from what `ebbtide simulate -o json` prints for `COMPARED_POLICIES`."""
    return tuple(
        ComparedOutcome(
            variant=_VARIANT_BY_POLICY[each["policy"]],
            policy=each["policy"],
            jobs=each["jobs"],
            completed=each["completed"],
            jct_mean_s=each["jct_s"]["mean"],
            jct_p95_s=each["jct_s"]["p95"],
            waiting_mean_s=each["queueing_s"]["mean"],
            makespan_s=each["makespan_s"],
            loaned_gpu_hours=each["loaned_gpu_hours"],
            idle_waiting_gpu_hours=each["idle_while_waiting_gpu_hours"],
            lost_gpu_hours=each["lost_gpu_hours"],
            short_ratio=each["inference_short_intervals_ratio"]["first_pass"],
        )
        for each in report["policies"]
    )


class ComparisonState(StrEnum):
    """State of a day's comparison.

    RUNNING: its input is prepared, or its simulation is queued or runs. SKIPPED: there was nothing to compare.
    """

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class DailyComparison:
    """The comparison that the leader made on one day.

    Args:
        day_s: start of the day (UTC).
        to_s: end of the recorded time, which is also when it was begun.
        simulation_id: the simulation that computes it, from when it is queued.
        reason: why it failed or was skipped.
        differences: how the simulated cluster differs from the recorded one, as sentences.
    """

    day_s: int
    to_s: float
    state: ComparisonState
    simulation_id: str
    reason: str = ""
    ended_at_s: float | None = None
    differences: tuple[str, ...] = ()
    outcomes: tuple[ComparedOutcome, ...] = ()

    @property
    def from_s(self) -> float:
        """Start of the recorded time."""
        return self.to_s - RECORDED_S


def find_day(at_s: float) -> int:
    """Return the start of the day (UTC) of a time."""
    return int(at_s // DAY_S) * DAY_S
