"""What Ebbtide has to know of a node, read once when it comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.k8s.kinds import EPOCH_ANNOTATION, GPU_RESOURCE, LOAN_LABEL, LOANED_TAINT_KEY
from scheduler.k8s.objects import number_of


@dataclass(frozen=True, slots=True)
class NodeView:
    """`gpus`: those that pods may have. `loan`: the loan that we lent it for, by our label; `is_tainted`: it bears our
    taint. `taints` are all of them, ours included. `labels` are all of them."""

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


def node_view(node: Mapping[str, Any]) -> NodeView:
    meta, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    labels, taints = meta.get("labels") or {}, tuple(spec.get("taints") or ())
    conditions = {each.get("type"): each.get("status") for each in status.get("conditions") or ()}
    return NodeView(
        name=meta["name"],
        resource_version=meta.get("resourceVersion", ""),
        is_ready=conditions.get("Ready") == "True" and "deletionTimestamp" not in meta,
        is_cordoned=bool(spec.get("unschedulable")),
        gpus=number_of((status.get("allocatable") or {}).get(GPU_RESOURCE)),
        loan=labels.get(LOAN_LABEL, ""),
        is_tainted=any(taint.get("key") == LOANED_TAINT_KEY for taint in taints),
        epoch=number_of((meta.get("annotations") or {}).get(EPOCH_ANNOTATION)),
        taints=taints,
        labels=labels,
    )
