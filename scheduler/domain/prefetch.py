"""Prefetch: images and weights that are loaded onto a node shortly before it changes hands, on Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TIMEOUT_S = 600.0
TIMEOUT_S_MIN, TIMEOUT_S_MAX = 10.0, 7_200.0


class PrefetchPurpose(StrEnum):
    """Reason of a prefetch on a node.

    TRAINING: images of jobs, while the node is offered. SERVING: images of the pool's inference pods, while it is
    recalled. WEIGHTS: the pod of the pool's owner, while it is recalled.
    """

    TRAINING = "training"
    SERVING = "serving"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class WeightsTemplate:
    """A PodTemplate whose pod loads weights onto its node."""

    namespace: str
    pod_template: str

    def __post_init__(self) -> None:
        for name in ("namespace", "pod_template"):
            if not getattr(self, name):
                raise ValueError(f"lending.prefetch.weights.{name} is empty. Name the PodTemplate that loads weights")


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """Loads onto the nodes of a pool before they are lent and before they are returned.

    Args:
        images: whether the images of the pods that come next are pulled.
        weights: loads weights onto a node that is recalled; None for nothing.
        timeout_s: time after which a prefetch is stopped.
    """

    images: bool = True
    weights: WeightsTemplate | None = None
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if not self.images and self.weights is None:
            raise ValueError("lending.prefetch loads nothing. Set images to true, or weights, or remove it")
        if not TIMEOUT_S_MIN <= self.timeout_s <= TIMEOUT_S_MAX:
            limits = f"{TIMEOUT_S_MIN:g} to {TIMEOUT_S_MAX:g}"
            raise ValueError(f"lending.prefetch.timeout_s must be {limits}, got {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """The end of one prefetch on a node, `seconds` after it was begun. `error` is empty if all was loaded."""

    id: str
    purpose: PrefetchPurpose
    at_s: float
    seconds: float
    error: str = ""
