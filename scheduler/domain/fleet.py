"""Pools and nodes: the hardware, and what its owners allow.

Loan: one inference node in training use, from the offer to the return.

Forecast: what a pool's inference is likely to need, as quantiles over a horizon.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

DAY_S = 86_400.0


class PoolKind(StrEnum):
    TRAINING = "training"
    INFERENCE = "inference"


class NodeState(StrEnum):
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Blackout:
    """A daily window, in seconds of the UTC day, in which nothing new is lent. It may wrap around midnight."""

    start_s: float
    end_s: float

    def covers(self, now_s: float) -> bool:
        second = now_s % DAY_S
        if self.start_s <= self.end_s:
            return self.start_s <= second < self.end_s
        return second >= self.start_s or second < self.end_s


@dataclass(frozen=True, slots=True)
class LendingPolicy:
    """What an inference pool's owner allows. Inference has the last word, so every bound here is hard.

    `quantile` is the forecast level that has to fit beside the loans, `headroom` the share of the pool's GPUs
    kept free on top. A recalled node is home within `return_deadline_s`, and serves `cold_start_s` later; the
    forecast looks ahead over the sum of both, so no loan is made that would be recalled sooner than that. Nor is one
    made that is expected to be shorter than `loan_s_min`, nor on a demand reading older than `demand_stale_s` (None:
    what the policy settings say).
    """

    enabled: bool = True
    quantile: float = 0.999
    headroom: float = 0.02
    return_deadline_s: float = 300.0
    cold_start_s: float = 300.0
    kept_nodes_min: int = 0
    lent_nodes_max: int | None = None
    loan_s_min: float = 0.0
    blackouts: tuple[Blackout, ...] = ()
    demand_stale_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.quantile < 1.0:
            raise ValueError(f"lending.quantile must be above 0 and below 1, got {self.quantile}")
        if not 0.0 <= self.headroom < 1.0:
            raise ValueError(f"lending.headroom must be at least 0 and below 1, got {self.headroom}")
        for name in ("return_deadline_s", "cold_start_s", "kept_nodes_min", "loan_s_min"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"lending.{name} must be at least 0, got {getattr(self, name)}")
        if self.lent_nodes_max is not None and self.lent_nodes_max < 0:
            raise ValueError(f"lending.lent_nodes_max must be at least 0, got {self.lent_nodes_max}")
        if self.demand_stale_s is not None and not self.demand_stale_s > 0:
            raise ValueError(f"lending.demand_stale_s must be above 0, got {self.demand_stale_s}")

    @property
    def horizon_s(self) -> float:
        """How far ahead a loan decision has to look: a node recalled now serves again this much later."""
        return self.return_deadline_s + self.cold_start_s


@dataclass(frozen=True, slots=True)
class Pool:
    name: str
    kind: PoolKind
    lending: LendingPolicy = field(default_factory=LendingPolicy)


@dataclass(frozen=True, slots=True)
class Node:
    """A host with `gpus` GPUs of one model. `pool` is its home for life, lent or not.

    `inference_gpus` is what inference uses on it, as last observed; `other_gpus` what others use who are neither
    inference nor jobs of ours, such as the pods of another scheduler: training does without those. A cordoned node
    takes nothing new; a draining one is cordoned and its jobs are moved away.
    """

    name: str
    pool: str
    gpu: str
    gpus: int
    gpu_memory_bytes: int
    state: NodeState = NodeState.UP
    cordoned: bool = False
    draining: bool = False
    inference_gpus: int = 0
    other_gpus: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"node {self.name}: gpus must be at least 1, got {self.gpus}")
        if self.gpu_memory_bytes < 1:
            raise ValueError(f"node {self.name}: gpu_memory_bytes must be at least 1, got {self.gpu_memory_bytes}")

    @property
    def unschedulable_gpus(self) -> int:
        """GPUs of a cordoned node that are no use to inference: it keeps what runs there, on a draining one nothing."""
        kept = 0 if self.draining else self.inference_gpus
        return max(0, self.gpus - kept) if self.cordoned else 0


@dataclass(frozen=True, slots=True)
class DemandReading:
    """How many GPUs a pool's inference needs, clamped to the pool's capacity; `asked_gpus` is the unclamped figure."""

    at_s: float
    gpus: float
    asked_gpus: float


class LoanState(StrEnum):
    OFFERED = "offered"
    ACTIVE = "active"
    RECALLED = "recalled"
    RETURNED = "returned"
    LOST = "lost"


UNRECALLED_LOAN_STATES = frozenset({LoanState.OFFERED, LoanState.ACTIVE})
LIVE_LOAN_STATES = UNRECALLED_LOAN_STATES | {LoanState.RECALLED}

LOAN_TRANSITIONS: dict[tuple[LoanState, LoanState], str] = {
    (LoanState.OFFERED, LoanState.ACTIVE): "the last inference pod left the node",
    (LoanState.OFFERED, LoanState.RETURNED): "inference wants the node before training used it, or cannot leave it",
    (LoanState.OFFERED, LoanState.LOST): "the node went down before training used it",
    (LoanState.ACTIVE, LoanState.RECALLED): "inference will need the node",
    (LoanState.ACTIVE, LoanState.LOST): "the node went down while lent",
    (LoanState.RECALLED, LoanState.ACTIVE): "the forecast fell again, so the recall was cancelled",
    (LoanState.RECALLED, LoanState.RETURNED): "training has left the node",
    (LoanState.RECALLED, LoanState.LOST): "the node went down before it was home",
}


@dataclass(frozen=True, slots=True)
class Loan:
    """`return_by_s` is set while RECALLED: the time by which training must have left. `lent_at_s` is when training
    could first use the node, `recalled_at_s` when the recall began that was not cancelled; both outlast the loan."""

    id: str
    node: str
    pool: str
    state: LoanState
    offered_at_s: float
    state_since_s: float
    return_by_s: float | None = None
    lent_at_s: float | None = None
    recalled_at_s: float | None = None

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_LOAN_STATES

    def transition_to(self, state: LoanState, now_s: float, *, return_by_s: float | None = None) -> Loan:
        """The loan in its next state.

        Raises:
            ValueError: the table of loan edges does not know the step.
        """
        if (self.state, state) not in LOAN_TRANSITIONS:
            raise ValueError(f"loan {self.id}: no step leads from {self.state} to {state}")
        lent_at_s = now_s if self.lent_at_s is None and state is LoanState.ACTIVE else self.lent_at_s
        recalled_at_s = {LoanState.ACTIVE: None, LoanState.RECALLED: now_s}.get(state, self.recalled_at_s)
        moved = replace(self, state=state, state_since_s=now_s, return_by_s=return_by_s)
        return replace(moved, lent_at_s=lent_at_s, recalled_at_s=recalled_at_s)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Quantiles of the largest GPU demand of one pool within the next `horizon_s` seconds.

    `quantiles` are ascending levels in (0, 1); `gpus[i]` is the demand that stays unexceeded with probability
    `quantiles[i]`. `method` names the forecaster, for people. `lasting_gpus` are the same over the shortest loan that
    is worth making, empty where the horizon covers it.
    """

    made_at_s: float
    horizon_s: float
    quantiles: tuple[float, ...]
    gpus: tuple[float, ...]
    method: str
    lasting_gpus: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.quantiles) != len(self.gpus) or not self.quantiles:
            raise ValueError("a forecast needs one GPU figure a quantile, and at least one")
        if list(self.quantiles) != sorted(self.quantiles):
            raise ValueError(f"quantiles must ascend, got {self.quantiles}")

    def demand_at(self, quantile: float) -> float:
        """GPU demand at the lowest stored level that is not below `quantile` (the highest one, failing that)."""
        return self.gpus[self._level_index(quantile)]

    def min_loan_demand_at(self, quantile: float) -> float:
        """Likewise over the shortest loan that is worth making."""
        return (self.lasting_gpus or self.gpus)[self._level_index(quantile)]

    def with_min_loan_forecast(self, longer: Forecast) -> Forecast:
        """The same with what `longer` says of the shortest loan that is worth making."""
        return replace(self, lasting_gpus=longer.gpus)

    def _level_index(self, quantile: float) -> int:
        return next((at for at, level in enumerate(self.quantiles) if level >= quantile), len(self.quantiles) - 1)
