"""Pool: nodes of one kind by their labels, to the domain's pool and back to a status."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scheduler.documents.custom_resource import DEMAND_STALE_S, DemandSpec, PoolSpec, TolerationSpec, pool_of
from scheduler.documents.document import read
from scheduler.documents.refusal import RefusedError
from scheduler.domain.fleet import Pool
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.resources.conditions import ACCEPTED, CONFLICT, DEMAND_KNOWN, Claim, claimed_before
from scheduler.k8s.resources.metadata import Resource, metadata, part
from scheduler.k8s.taints import Toleration


class DemandKind(StrEnum):
    """Where it is known from how many GPUs inference needs."""

    DEPLOYMENTS = "deployments"
    PROMETHEUS = "prometheus"
    PUSH = "push"


@dataclass(frozen=True, slots=True)
class DemandSource:
    """`selector`: labels of the Deployments that serve; `query`: PromQL. A reading older than `stale_after_s` says
    nothing of the present."""

    kind: DemandKind
    selector: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    stale_after_s: float = DEMAND_STALE_S


@dataclass(frozen=True, slots=True)
class PoolResource:
    """A Pool as it was read. `gpu` empty: the nodes' labels say it; likewise their GPUs' memory. `demand_claims`: what
    its status says of its demand. Training bears the taints of its nodes that `tolerations` cover."""

    pool: Pool
    uid: str
    selector: Mapping[str, str]
    gpu: str = ""
    gpu_memory_bytes: int | None = None
    demand: DemandSource = DemandSource(DemandKind.PUSH)
    demand_claims: tuple[Claim, ...] = ()
    tolerations: tuple[Toleration, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(name) == value for name, value in self.selector.items())


def read_pool(resource: Resource) -> PoolResource:
    """What the Pool asks for.

    Raises:
        RefusedError: fields are refused; the message names each with its value and what is allowed.
    """
    meta = metadata(resource)
    spec = read(PoolSpec, resource.get("spec"))
    return PoolResource(
        pool=pool_of(meta.name, spec),
        uid=meta.uid,
        selector=spec.node_selector,
        gpu=spec.gpu,
        gpu_memory_bytes=spec.gpu_memory,
        demand=_demand(spec.demand),
        demand_claims=claimed_before(part(resource, "status").get("conditions"), DEMAND_KNOWN),
        tolerations=tuple(map(_toleration, spec.tolerations)),
    )


def tolerations_of(resources: Iterable[Resource]) -> dict[str, tuple[Toleration, ...]]:
    """Those of each Pool by its name, of one that is refused none."""
    found = {}
    for resource in resources:
        try:
            pool = read_pool(resource)
        except RefusedError:
            continue
        found[pool.pool.name] = pool.tolerations
    return found


def pool_status(name: str, snapshot: Snapshot, *, claims: Iterable[Claim], cordoned: Collection[str]) -> dict[str, Any]:
    """The status of a Pool, but for its time. `cordoned` are nodes that the cluster wants cordoned, or did when the
    status was last written."""
    claims = tuple(claims)
    nodes = [node for node in snapshot.nodes.values() if node.pool == name]
    reading = snapshot.demand.get(name)
    status = {
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "lentNodes": sum(snapshot.is_lent(node) for node in nodes),
        "demandGpus": None if reading is None else f"{reading.asked_gpus:g}",
        "problem": next((claim.reason for claim in claims if claim.holds is (claim.type == CONFLICT)), None),
        "cordonedNodes": sorted(node.name for node in nodes if node.cordoned and node.name in cordoned),
        "conditions": claims,
    }
    return {key: value for key, value in status.items() if value is not None}


def accepted() -> Claim:
    return Claim(ACCEPTED, True, "Accepted")


def _toleration(spec: TolerationSpec) -> Toleration:
    return Toleration(spec.key, None if spec.operator == "Exists" else spec.value, spec.effect or "")


def _demand(spec: DemandSpec | None) -> DemandSource:
    if spec is None:
        return DemandSource(DemandKind.PUSH)
    stale_after_s = DEMAND_STALE_S if spec.stale_after is None else spec.stale_after
    return DemandSource(DemandKind(spec.source), spec.selector or {}, spec.query or "", stale_after_s)
