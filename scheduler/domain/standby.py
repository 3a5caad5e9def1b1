"""Standby replicas: inference engines that sleep on their node while it is lent, and wake when it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

PORT_MAX = 65_535
TIMEOUT_S = 60.0
TIMEOUT_S_MAX = 3_600.0
RETRY_S = 900.0
"""Time without a new loan of a node whose replica did not fall asleep."""
LEVELS = (1, 2)
"""Sleep levels of vLLM. Level 1 moves the weights to host memory, level 2 drops them."""
SELECTOR_LABELS_MAX = 16


@dataclass(frozen=True, slots=True)
class Standby:
    """How the replicas of a pool sleep while their nodes are lent.

    The replicas on a node are the pods in `namespace` with all labels of `selector`. They request no GPU from
    Kubernetes, because a pod keeps the GPUs that it requests while its engine sleeps.

    Args:
        port: of the engine's HTTP API, which offers vLLM's `/sleep`, `/wake_up` and `/is_sleeping`.
        level: sleep level, one of `LEVELS`.
        gpu_memory_bytes: memory that sleeping replicas keep on each GPU of their node.
        host_memory_bytes: memory that sleeping replicas keep on their node in total.
        wake_s: expected time from the return of a node until its replicas serve; None for the pool's `cold_start_s`.
        timeout_s: time within which a replica must fall asleep, or wake.
    """

    namespace: str
    selector: Mapping[str, str] = field(default_factory=dict)
    port: int = 8000
    level: int = 1
    gpu_memory_bytes: int = 0
    host_memory_bytes: int = 0
    wake_s: float | None = None
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if not self.namespace:
            raise ValueError("lending.standby.namespace is empty. Name the namespace of the replicas")
        if not 1 <= len(self.selector) <= SELECTOR_LABELS_MAX:
            labels = f"1 to {SELECTOR_LABELS_MAX} labels"
            raise ValueError(f"lending.standby.selector must have {labels}, got {len(self.selector)}")
        if not 1 <= self.port <= PORT_MAX:
            raise ValueError(f"lending.standby.port must be 1 to {PORT_MAX}, got {self.port}")
        if self.level not in LEVELS:
            raise ValueError(f"lending.standby.level must be 1 or 2, got {self.level}")
        for name in ("gpu_memory_bytes", "host_memory_bytes", "wake_s"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ValueError(f"lending.standby.{name} must be at least 0, got {value}")
        if not 0 < self.timeout_s <= TIMEOUT_S_MAX:
            limits = f"above 0 and at most {TIMEOUT_S_MAX:g}"
            raise ValueError(f"lending.standby.timeout_s must be {limits}, got {self.timeout_s}")

    def matches(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Return whether a pod is one of the replicas."""
        return namespace == self.namespace and all(labels.get(name) == value for name, value in self.selector.items())


class StandbyPhase(StrEnum):
    """State of the replicas on a node.

    ABSENT: the node has none that can sleep. SLEEP_FAILED and WAKE_FAILED: a replica did not fall asleep, or did not
    wake.
    """

    AWAKE = "awake"
    ASLEEP = "asleep"
    ABSENT = "absent"
    SLEEP_FAILED = "sleep_failed"
    WAKE_FAILED = "wake_failed"


@dataclass(frozen=True, slots=True)
class StandbyState:
    """The replicas on a node of a pool with a standby, as last observed.

    `detail` says why they are absent or have failed. After a failure to fall asleep, `failure` keeps the detail, and
    the node is not lent before `retry_at_s`.
    """

    phase: StandbyPhase
    since_s: float
    detail: str = ""
    failure: str = ""
    retry_at_s: float = 0.0

    def find_loan_obstacle(self, now_s: float) -> str:
        """Return why the node cannot be lent now, or an empty string."""
        if self.phase in (StandbyPhase.ABSENT, StandbyPhase.WAKE_FAILED):
            return self.detail
        return self.failure if now_s < self.retry_at_s else ""


def advance_standby(known: StandbyState | None, phase: StandbyPhase, detail: str, now_s: float) -> StandbyState:
    """Return the state after an observation: the known object if it says nothing new."""
    is_repeated = known is not None and phase is known.phase
    if known is not None and is_repeated and (detail == known.detail or phase is StandbyPhase.SLEEP_FAILED):
        return known
    since_s = known.since_s if known is not None and is_repeated else now_s
    if phase is StandbyPhase.SLEEP_FAILED:
        return StandbyState(phase, since_s, detail, detail, now_s + RETRY_S)
    if phase is StandbyPhase.ASLEEP or known is None:
        return StandbyState(phase, since_s, detail)
    return StandbyState(phase, since_s, detail, known.failure, known.retry_at_s)
