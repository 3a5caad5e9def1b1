"""The few numbers that all policies share."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`full_pass_period_s`: longest pause between ticks that consider lending and flexible GPUs.
    `reconfiguration_s`: what a start or resize costs a job. `leave_grace_s`: how long workers may take to save
    and leave where no return deadline says otherwise. `ageing_s`: waiting this long halves a job's apparent
    length. `patience_ageings`: after so many `ageing_s` of waiting a job is overdue, and nobody passes it any more.
    `resize_pause_s`: least time between two resizes that nobody was forced into. `demand_stale_s`: a
    demand reading older than this permits no new loan.
    """

    full_pass_period_s: float = 300.0
    reconfiguration_s: float = 30.0
    leave_grace_s: float = 60.0
    ageing_s: float = 3600.0
    patience_ageings: float = 12.0
    resize_pause_s: float = 600.0
    demand_stale_s: float = 1800.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value < float("inf") or (value == 0 and item.name in ("full_pass_period_s", "ageing_s")):
                raise ValueError(f"{item.name} must be a positive, finite number, got {value}")
