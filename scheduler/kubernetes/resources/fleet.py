"""What is known of a pool's demand: a number with its time, or why there is none.

Pool: nodes of one kind by their labels, to the domain's pool and back to a status.

Nodes of the cluster as the fleet knows them.

Queue: who pays for jobs, to the domain's JobQueue and back to a status.

Loan: the custom resource that tells of a node in training use. Nobody but us writes one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any

from scheduler.documents.custom_resource import (
    DEMAND_STALE_S,
    DemandSpec,
    PoolSpec,
    QueueSpec,
    TolerationSpec,
    pool_from_spec,
    queue_from_spec,
)
from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.domain.fleet import Loan, Node, Pool
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import GPU_LABEL, GPU_PRODUCT_LABEL, GPU_RESOURCE, LOAN
from scheduler.kubernetes.node_view import Toleration, find_untolerated_taints
from scheduler.kubernetes.resources.meta import (
    ACCEPTED,
    CONFLICT,
    DEMAND_KNOWN,
    Condition,
    Resource,
    find_previous_condition,
    format_time,
    get_mapping,
    parse_metadata,
)
from scheduler.scheduling.policies.quota import QueueUsage
from scheduler.solver.profiles.catalog import list_gpu_names, load_gpu


class UnknownDemandReason(StrEnum):
    """Why nobody can say how many GPUs inference needs."""

    NO_DEPLOYMENT_MATCHES = "NoDeploymentMatches"
    NO_SERIES = "NoSeries"
    MANY_SERIES = "ManySeries"
    NOT_A_NUMBER = "NotANumber"
    STALE = "Stale"
    UNREACHABLE = "Unreachable"
    BAD_QUERY = "BadQuery"
    NOT_ASKED_YET = "NotAskedYet"
    NOT_PUSHED_YET = "NotPushedYet"


@dataclass(frozen=True, slots=True)
class KnownDemand:
    """`gpus` were needed at `at_s`."""

    gpus: float
    at_s: float


@dataclass(frozen=True, slots=True)
class UnknownDemand:
    """Nothing new can be told. `message` stays the same while what is wrong does."""

    reason: UnknownDemandReason
    message: str


PoolDemand = KnownDemand | UnknownDemand


class DemandSourceKind(StrEnum):
    """Where it is known from how many GPUs inference needs."""

    DEPLOYMENTS = "deployments"
    PROMETHEUS = "prometheus"
    PUSH = "push"


@dataclass(frozen=True, slots=True)
class DemandSource:
    """`selector`: labels of the Deployments that serve; `query`: PromQL. A reading older than `stale_after_s` says
    nothing of the present."""

    kind: DemandSourceKind
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
    demand: DemandSource = DemandSource(DemandSourceKind.PUSH)
    demand_conditions: tuple[Condition, ...] = ()
    tolerations: tuple[Toleration, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(name) == value for name, value in self.selector.items())


def parse_pool(resource: Resource) -> PoolResource:
    """What the Pool asks for.

    Raises:
        RefusedError: fields are refused; the message names each with its value and what is allowed.
    """
    meta = parse_metadata(resource)
    spec = parse_document(PoolSpec, resource.get("spec"))
    return PoolResource(
        pool=pool_from_spec(meta.name, spec),
        uid=meta.uid,
        selector=spec.node_selector,
        gpu=spec.gpu,
        gpu_memory_bytes=spec.gpu_memory,
        demand=_to_demand_source(spec.demand),
        demand_conditions=find_previous_condition(get_mapping(resource, "status").get("conditions"), DEMAND_KNOWN),
        tolerations=tuple(map(_to_toleration, spec.tolerations)),
    )


def parse_pool_tolerations(resources: Iterable[Resource]) -> dict[str, tuple[Toleration, ...]]:
    """Those of each Pool by its name, of one that is refused none."""
    found = {}
    for resource in resources:
        try:
            pool = parse_pool(resource)
        except InvalidDocumentError:
            continue
        found[pool.pool.name] = pool.tolerations
    return found


def build_pool_status(
    name: str, snapshot: Snapshot, *, conditions: Iterable[Condition], cordoned: Collection[str]
) -> dict[str, Any]:
    """The status of a Pool, but for its time. `cordoned` are nodes that the cluster wants cordoned, or did when the
    status was last written."""
    conditions = tuple(conditions)
    nodes = [node for node in snapshot.nodes.values() if node.pool == name]
    reading = snapshot.demand.get(name)
    status = {
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "lentNodes": sum(snapshot.is_lent(node) for node in nodes),
        "demandGpus": None if reading is None else f"{reading.asked_gpus:g}",
        "problem": next((claim.reason for claim in conditions if claim.holds is (claim.type == CONFLICT)), None),
        "cordonedNodes": sorted(node.name for node in nodes if node.cordoned and node.name in cordoned),
        "conditions": conditions,
    }
    return {key: value for key, value in status.items() if value is not None}


def build_accepted_condition() -> Condition:
    return Condition(ACCEPTED, True, "Accepted")


def _to_toleration(spec: TolerationSpec) -> Toleration:
    return Toleration(spec.key, None if spec.operator == "Exists" else spec.value, spec.effect or "")


def _to_demand_source(spec: DemandSpec | None) -> DemandSource:
    if spec is None:
        return DemandSource(DemandSourceKind.PUSH)
    stale_after_s = DEMAND_STALE_S if spec.stale_after is None else spec.stale_after
    return DemandSource(DemandSourceKind(spec.source), spec.selector or {}, spec.query or "", stale_after_s)


GPU_MODEL_BY_PRODUCT: Mapping[str, str] = MappingProxyType(
    {
        "Tesla-T4": "t4",
        "Tesla-V100-SXM2-32GB": "v100-32g",
        "Tesla-V100-SXM3-32GB": "v100-32g",
        "Tesla-V100-PCIE-32GB": "v100-32g",
        "NVIDIA-A100-SXM4-40GB": "a100-40g",
        "NVIDIA-A100-PCIE-40GB": "a100-40g",
        "NVIDIA-A100-SXM4-80GB": "a100-80g",
        "NVIDIA-A100-80GB-PCIe": "a100-80g",
        "NVIDIA-A800-SXM4-80GB": "a800-80g",
        "NVIDIA-A800-80GB-PCIe": "a800-80g",
        "NVIDIA-H100-80GB-HBM3": "h100-80g",
        "NVIDIA-H100-PCIe": "h100-80g",
        "NVIDIA-H200": "h200",
        "NVIDIA-H200-NVL": "h200",
        "NVIDIA-L40S": "l40s",
    }
)
"""What NVIDIA's feature discovery writes into the label nvidia.com/gpu.product, by the driver's name of the product.
Shared and partitioned GPUs have a suffix there and are none of these."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node as the cluster tells of it. `product` is what it says of its GPU model, empty where it says nothing;
    `taints` are all of them."""

    name: str
    labels: Mapping[str, str]
    gpus: int
    is_cordoned: bool
    product: str
    taints: tuple[Mapping[str, Any], ...] = ()


def parse_cluster_node(node: Resource) -> ClusterNode:
    meta = parse_metadata(node)
    labels = meta.labels
    return ClusterNode(
        name=meta.name,
        labels=labels,
        gpus=_count_allocatable_gpus(node),
        is_cordoned=get_mapping(node, "spec").get("unschedulable") is True or meta.is_deleting,
        product=labels.get(GPU_LABEL) or labels.get(GPU_PRODUCT_LABEL, ""),
        taints=tuple(get_mapping(node, "spec").get("taints") or ()),
    )


def to_fleet_node(cluster_node: ClusterNode, pool: PoolResource) -> Node | None:
    """The host as a node of the pool, cordoned where nothing new is to begin there; None where it has no GPUs or their
    model is not known."""
    gpu = find_gpu_model(cluster_node, pool)
    if cluster_node.gpus < 1 or gpu is None:
        return None
    memory_bytes = pool.gpu_memory_bytes or load_gpu(gpu).memory_bytes
    is_closed = cluster_node.is_cordoned or bool(find_untolerated_taints(cluster_node.taints, pool.tolerations))
    return Node(cluster_node.name, pool.pool.name, gpu, cluster_node.gpus, memory_bytes, cordoned=is_closed)


def find_gpu_model(cluster_node: ClusterNode, pool: PoolResource) -> str | None:
    """The host's GPU model: what its pool says, else its labels; None where there is no profile of it."""
    name = pool.gpu or GPU_MODEL_BY_PRODUCT.get(cluster_node.product, cluster_node.product)
    return name if name in _known_gpu_models() else None


@cache
def _known_gpu_models() -> frozenset[str]:
    return frozenset(list_gpu_names())


def _count_allocatable_gpus(node: Resource) -> int:
    """What kubelet lets pods have: a GPU that has failed its health check does not count."""
    text = str(get_mapping(get_mapping(node, "status"), "allocatable").get(GPU_RESOURCE, 0))
    return int(text) if text.isascii() and text.isdigit() else 0


def parse_queue(resource: Resource) -> JobQueue:
    """What the Queue asks for.

    Raises:
        RefusedError: fields are refused; the message names each with its value and what is allowed.
    """
    return queue_from_spec(parse_metadata(resource).name, parse_document(QueueSpec, resource.get("spec")))


def build_queue_status(use: QueueUsage | None, conditions: Iterable[Condition]) -> dict[str, Any]:
    """The status of a Queue, but for its time; nobody uses a queue that nobody names."""
    return {
        "usedGpus": use.used_gpus if use else 0,
        "borrowedGpus": use.borrowed_gpus if use else 0,
        "runningJobs": use.running_jobs if use else 0,
        "waitingJobs": use.waiting_jobs if use else 0,
        "conditions": tuple(conditions),
    }


def build_loan(loan: Loan, annotations: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": LOAN.api_version,
        "kind": LOAN.name,
        "metadata": {"name": loan.id, "annotations": annotations},
        "spec": {"node": loan.node, "pool": loan.pool},
    }


def build_loan_status(loan: Loan, snapshot: Snapshot) -> dict[str, Any]:
    """`usedGpus` and `jobs` tell who is on the node now, those who are leaving it included."""
    node = snapshot.nodes.get(loan.node)
    holders = snapshot.index.holders.get(loan.node, {}) if loan.is_live else {}
    status = {
        "state": loan.state.value,
        "stateSince": format_time(loan.state_since_s),
        "offeredAt": format_time(loan.offered_at_s),
        "returnBy": None if loan.return_by_s is None else format_time(loan.return_by_s),
        "gpus": None if node is None else node.gpus,
        "usedGpus": len(holders),
        "jobs": ", ".join(sorted(set(holders.values()))) or None,
    }
    return {name: value for name, value in status.items() if value is not None}
