"""Taints of nodes, and which of them are tolerated, as Kubernetes has them: what keeps a pod off a node keeps our pods
off too, although we bind them past the scheduler that would look.

Source: Kubernetes, "Taints and Tolerations".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.k8s.kinds import GPU_RESOURCE, LOANED_TAINT_KEY

_TOLD_ELSEWHERE = frozenset(f"node.kubernetes.io/{what}" for what in ("not-ready", "unreachable", "unschedulable"))
"""What these say of a node, its condition and its cordon say as well."""


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Toleration:
    """Of taints of any value where `value` is None, of any key where `key` is empty, likewise `effect`."""

    key: str = ""
    value: str | None = None
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        return (
            self.key in ("", taint.key)
            and (self.value is None or self.value == taint.value)
            and self.effect in ("", taint.effect)
        )

    def as_object(self) -> dict[str, str]:
        """As a pod has it."""
        matched = {"operator": "Exists"} if self.value is None else {"operator": "Equal", "value": self.value}
        named = {"key": self.key, **matched, "effect": self.effect}
        return {name: text for name, text in named.items() if text or name == "value"}


OF_GPUS = Toleration(GPU_RESOURCE)
"""Taints of this key keep pods without GPUs off dear nodes. Kubernetes' own admission plugin
ExtendedResourceToleration gives it to each pod that asks for GPUs."""


def repelling(taints: Iterable[Mapping[str, Any]]) -> frozenset[Taint]:
    """Those of a node's `spec.taints` that keep pods off, not those that only advise against it."""
    named = (Taint(*(str(taint.get(name) or "") for name in ("key", "value", "effect"))) for taint in taints)
    return frozenset(taint for taint in named if taint.effect != "PreferNoSchedule")


def closing(taints: Iterable[Mapping[str, Any]], tolerations: Iterable[Toleration]) -> tuple[Taint, ...]:
    """The taints of others that keep our pods off a node whose pool tolerates these."""
    tolerated = (OF_GPUS, *tolerations)
    left = (
        taint
        for taint in repelling(taints)
        if taint.key != LOANED_TAINT_KEY
        and taint.key not in _TOLD_ELSEWHERE
        and not any(toleration.covers(taint) for toleration in tolerated)
    )
    return tuple(sorted(left, key=str))
