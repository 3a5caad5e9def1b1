"""Nodes as Ebbtide sees them, and taints and tolerations with Kubernetes semantics.

Ebbtide binds pods itself, so it must apply the taints that the Kubernetes scheduler would have applied.

Source: Kubernetes documentation, "Taints and Tolerations".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.domain.node_selection import Taint as Taint
from scheduler.domain.node_selection import Toleration as Toleration
from scheduler.domain.quantities import Resources, freeze_resources, parse_resources
from scheduler.kubernetes.api_objects import EPOCH_ANNOTATION, GPU_RESOURCE, LOAN_LABEL, LOANED_TAINT_KEY, parse_count

CONDITION_TAINT_KEYS = frozenset(f"node.kubernetes.io/{what}" for what in ("not-ready", "unreachable", "unschedulable"))
"""Taints that repeat the node's conditions and cordon."""


GPU_TOLERATION = Toleration(GPU_RESOURCE)
"""Tolerates taints that keep pods without GPUs off GPU nodes. Kubernetes' admission plugin ExtendedResourceToleration
adds it to every pod that requests GPUs.
"""


def find_repelling_taints(taints: Iterable[Mapping[str, Any]]) -> frozenset[Taint]:
    """Return the taints that keep pods off. PreferNoSchedule only advises."""
    parsed = (Taint(*(str(taint.get(name) or "") for name in ("key", "value", "effect"))) for taint in taints)
    return frozenset(taint for taint in parsed if taint.effect != "PreferNoSchedule")


def find_untolerated_taints(
    taints: Iterable[Mapping[str, Any]], tolerations: Iterable[Toleration]
) -> tuple[Taint, ...]:
    """Return the taints, our own excepted, that keep our pods off a node of a pool with these tolerations."""
    tolerated = (GPU_TOLERATION, *tolerations)
    remaining = (
        taint
        for taint in find_repelling_taints(taints)
        if taint.key != LOANED_TAINT_KEY
        and taint.key not in CONDITION_TAINT_KEYS
        and not any(toleration.tolerates(taint) for toleration in tolerated)
    )
    return tuple(sorted(remaining, key=str))


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node.

    `gpus` are allocatable. `loan` is the loan in our label; `is_tainted`: it has our taint. `taints` and `labels` are
    complete, our own included. `allocatable` is what it offers besides GPUs, None if that is unknown.
    """

    name: str
    resource_version: str
    is_ready: bool
    is_cordoned: bool
    gpus: int
    loan: str = ""
    is_tainted: bool = False
    epoch: int = 0
    taints: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Resources | None = None
    uid: str = ""


def parse_node_view(node: Mapping[str, Any]) -> NodeView:
    meta, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    labels, taints = meta.get("labels") or {}, tuple(spec.get("taints") or ())
    conditions = {each.get("type"): each.get("status") for each in status.get("conditions") or ()}
    allocatable = status.get("allocatable") or {}
    return NodeView(
        name=meta["name"],
        resource_version=meta.get("resourceVersion", ""),
        is_ready=conditions.get("Ready") == "True" and "deletionTimestamp" not in meta,
        is_cordoned=bool(spec.get("unschedulable")),
        gpus=parse_count(allocatable.get(GPU_RESOURCE)),
        loan=labels.get(LOAN_LABEL, ""),
        is_tainted=any(taint.get("key") == LOANED_TAINT_KEY for taint in taints),
        epoch=parse_count((meta.get("annotations") or {}).get(EPOCH_ANNOTATION)),
        taints=taints,
        labels=labels,
        allocatable=freeze_resources(parse_resources(without_gpus(allocatable))) if allocatable else None,
        uid=meta.get("uid", ""),
    )


def without_gpus(resources: Mapping[str, Any]) -> dict[str, Any]:
    return {name: amount for name, amount in resources.items() if name != GPU_RESOURCE}
