"""LendingPolicy: the limits that the owner of an inference pool sets for its loans."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Blackout:
    """A daily window without new loans, in seconds of the UTC day. It may wrap around midnight."""

    start_s: float
    end_s: float

    def covers(self, now_s: float) -> bool:
        second = now_s % DAY_S
        if self.start_s <= self.end_s:
            return self.start_s <= second < self.end_s
        return second >= self.start_s or second < self.end_s


SHORTAGE_TARGET, SHORTAGE_TARGET_MAX = 0.001, 0.1
VETO_S = 3600.0


class LendingMode(StrEnum):
    """Whether a pool lends, or only records the loans that it would make."""

    LEND = "lend"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class LendingPolicy:
    """Limits that the owner of an inference pool sets for its loans. All of them are hard.

    The forecast demand, plus `headroom` as a fraction of the pool's GPUs, must remain in the pool. The level of the
    forecast is `quantile`, or follows from `shortage_target`: the share of five-minute intervals, over two weeks, in
    which loans may leave inference short. Without either, the target is `SHORTAGE_TARGET`.
    A recalled node is returned within `return_deadline_s` and serves inference `cold_start_s` later; the forecast looks
    ahead over the sum of both. A loan must be expected to last `loan_s_min`. A demand reading older than
    `demand_stale_s` permits no new loan (None: the value of the policy settings).
    In `mode` SHADOW, the pool decides as if it lent, and lends nothing. With `notice_s`, a loan is proposed so many
    seconds before its node is offered. A node whose proposal was vetoed is not proposed again for `veto_s`.
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
    mode: LendingMode = LendingMode.LEND
    notice_s: float = 0.0
    veto_s: float = VETO_S

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

    @property
    def is_shadow(self) -> bool:
        return self.mode is LendingMode.SHADOW

    @property
    def horizon_s(self) -> float:
        """Time from a recall until the node serves inference again, and so the forecast horizon of a loan."""
        return self.return_deadline_s + self.cold_start_s
