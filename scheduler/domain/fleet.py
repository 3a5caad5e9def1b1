"""Pools and nodes: the hardware, and what its owners allow."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    def closed_gpus(self) -> int:
        """GPUs of a cordoned node that are no use to inference: it keeps what runs there, on a draining one nothing."""
        kept = 0 if self.draining else self.inference_gpus
        return max(0, self.gpus - kept) if self.cordoned else 0


@dataclass(frozen=True, slots=True)
class DemandReading:
    """How many GPUs a pool's inference needs, clamped to the pool's capacity; `asked_gpus` is the unclamped figure."""

    at_s: float
    gpus: float
    asked_gpus: float
