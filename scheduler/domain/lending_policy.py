"""LendingPolicy: the limits that the owner of an inference pool sets for its loans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from scheduler.domain.known_events import KnownEvent
from scheduler.domain.prefetch import PrefetchPolicy
from scheduler.domain.standby import Standby, StandbyMode
from scheduler.domain.time_zones import describe_zone_form, is_zone

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Blackout:
    """Times without new loans.

    Without `cron`, a daily window from `start_s` to `end_s` seconds after midnight, by the clock of `time_zone` (empty:
    UTC). It may wrap around midnight. With `cron`, a window from `start_s` to `end_s` seconds after each time of the
    expression, by the clock of `time_zone` (empty: that of the pool).
    """

    start_s: float
    end_s: float
    cron: str = ""
    time_zone: str = ""

    def __post_init__(self) -> None:
        if self.time_zone and not is_zone(self.time_zone):
            form = describe_zone_form(self.time_zone)
            raise ValueError(f"lending.blackouts: time_zone must be {form}, got {self.time_zone!r}")


KNOWN_EVENTS_MAX = 100
PROFILE_HOURS = (24, 168)

SHORTAGE_TARGET, SHORTAGE_TARGET_MAX = 0.001, 0.1
DEMAND_LOST_S = 1800.0
"""Default age of the newest demand reading at which all loans are recalled."""
VETO_S = 3600.0


class LendingMode(StrEnum):
    """Whether a pool lends, or only records the loans that it would make."""

    LEND = "lend"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class LendingPolicy:
    """Limits that the owner of an inference pool sets for its loans. All of them are hard.

    The forecast demand, plus `headroom` as a fraction of the pool's GPUs, must remain in the pool. The level of the
    forecast is `quantile`, or follows from `shortage_target`: the share of five-minute intervals, over four weeks, in
    which loans may leave inference short. Without either, the target is `SHORTAGE_TARGET`.
    A recalled node is returned within `return_deadline_s` and serves inference `cold_start_s` later; the forecast looks
    ahead over the sum of both. A loan must be expected to last `loan_s_min`. A demand reading older than
    `demand_stale_s` permits no new loan (None: the value of the policy settings). One older than `demand_lost_s`
    recalls all loans (None: `DEMAND_LOST_S`, or twice the age at which it is stale if that is longer).
    `time_zone` is the IANA zone whose clock demand follows. `known_events` raise the forecast before and while they
    last. `demand_profile` is the expected demand in GPUs by local hour of the day, or of the week from Monday on. A
    pool without a calibrated forecast lends by it.
    In `mode` SHADOW, the pool decides as if it lent, and lends nothing. With `notice_s`, a loan is proposed so many
    seconds before its node is offered. A node whose proposal was vetoed is not proposed again for `veto_s`.
    With `standby`, only nodes are lent whose replicas of inference have fallen asleep, or get no requests. `prefetch`
    loads images and weights onto nodes before they are lent and before they are returned.
    """

    enabled: bool = True
    quantile: float | None = None
    headroom: float = 0.02
    return_deadline_s: float = 300.0
    cold_start_s: float = 300.0
    kept_nodes_min: int = 0
    lent_nodes_max: int | None = None
    loan_s_min: float = 0.0
    blackouts: tuple[Blackout, ...] = ()
    demand_stale_s: float | None = None
    shortage_target: float | None = None
    time_zone: str = "UTC"
    known_events: tuple[KnownEvent, ...] = ()
    demand_profile: tuple[float, ...] = ()
    demand_lost_s: float | None = None
    mode: LendingMode = LendingMode.LEND
    notice_s: float = 0.0
    veto_s: float = VETO_S
    standby: Standby | None = None
    prefetch: PrefetchPolicy | None = None

    def __post_init__(self) -> None:
        if self.quantile is not None and self.shortage_target is not None:
            raise ValueError(
                f"lending.quantile is {self.quantile} and lending.shortage_target is {self.shortage_target}, but each "
                "sets the risk. Set one of them"
            )
        if self.quantile is None and self.shortage_target is None:
            object.__setattr__(self, "shortage_target", SHORTAGE_TARGET)
        if self.quantile is not None and not 0.0 < self.quantile < 1.0:
            raise ValueError(f"lending.quantile must be above 0 and below 1, got {self.quantile}")
        if self.shortage_target is not None and not 0.0 < self.shortage_target <= SHORTAGE_TARGET_MAX:
            limits = f"above 0 and at most {SHORTAGE_TARGET_MAX}"
            raise ValueError(f"lending.shortage_target must be {limits}, got {self.shortage_target}")
        if not 0.0 <= self.headroom < 1.0:
            raise ValueError(f"lending.headroom must be at least 0 and below 1, got {self.headroom}")
        for name in ("return_deadline_s", "cold_start_s", "kept_nodes_min", "loan_s_min", "notice_s", "veto_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"lending.{name} must be at least 0, got {getattr(self, name)}")
        if self.lent_nodes_max is not None and self.lent_nodes_max < 0:
            raise ValueError(f"lending.lent_nodes_max must be at least 0, got {self.lent_nodes_max}")
        if self.demand_stale_s is not None and not self.demand_stale_s > 0:
            raise ValueError(f"lending.demand_stale_s must be above 0, got {self.demand_stale_s}")
        if self.demand_lost_s is not None and not self.demand_lost_s > (self.demand_stale_s or 0.0):
            least = f"above lending.demand_stale_s, {self.demand_stale_s:g}" if self.demand_stale_s else "above 0"
            raise ValueError(f"lending.demand_lost_s must be {least}, got {self.demand_lost_s:g}")
        is_warm = self.standby is not None and self.standby.mode is StandbyMode.WARM
        if self.standby is not None and is_warm and self.standby.drain_s >= self.return_deadline_s:
            raise ValueError(
                f"lending.standby.drain_s must be below lending.return_deadline_s, {self.return_deadline_s:g}, when "
                f"an offer ends, got {self.standby.drain_s:g}"
            )
        self._check_calendar()

    def _check_calendar(self) -> None:
        if not is_zone(self.time_zone):
            form = describe_zone_form(self.time_zone)
            raise ValueError(f"lending.time_zone must be {form}, got {self.time_zone!r}")
        if len(self.known_events) > KNOWN_EVENTS_MAX:
            count = len(self.known_events)
            raise ValueError(f"lending.known_events has {count} events, more than {KNOWN_EVENTS_MAX}. Remove past ones")
        if self.demand_profile and len(self.demand_profile) not in PROFILE_HOURS:
            hours = f"{PROFILE_HOURS[0]} or {PROFILE_HOURS[1]} numbers, one per hour of the day or of the week"
            raise ValueError(f"lending.demand_profile must have {hours}, got {len(self.demand_profile)}")
        if not all(0 <= gpus < math.inf for gpus in self.demand_profile):
            raise ValueError(f"lending.demand_profile must have numbers of at least 0, got {min(self.demand_profile)}")

    def find_demand_lost_s(self, stale_s: float) -> float:
        """Return the age of the newest reading at which all loans are recalled, if it is stale after `stale_s`."""
        return max(DEMAND_LOST_S, 2.0 * stale_s) if self.demand_lost_s is None else self.demand_lost_s

    @property
    def is_shadow(self) -> bool:
        return self.mode is LendingMode.SHADOW

    @property
    def start_s(self) -> float:
        """Declared time from the return of a node until it serves inference."""
        wake_s = None if self.standby is None else self.standby.wake_s
        return self.cold_start_s if wake_s is None else wake_s

    @property
    def horizon_s(self) -> float:
        """Time from a recall until the node serves inference again, and so the forecast horizon of a loan."""
        return self.return_deadline_s + self.start_s
