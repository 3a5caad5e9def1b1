"""Pools, Queues, Loans and cluster nodes: parsing specs into the domain's types, and building statuses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scheduler.documents.custom_resource import (
    DemandSpec,
    PoolSpec,
    TolerationSpec,
    pool_from_spec,
    prometheus_demand_from_spec,
)
from scheduler.documents.document import InvalidDocumentError, InvalidField, parse_document, to_printable
from scheduler.documents.queue import queue_from_spec
from scheduler.domain.demand_source import DEMAND_STALE_S, PrometheusDemand
from scheduler.domain.fleet import Loan, LoanState, Node, Pool, PoolKind, list_last_gpus
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.pod_requirements import UNKNOWN_CAPACITY
from scheduler.domain.replica_advice import ReplicaAdvice
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.suggestions import suggest
from scheduler.kubernetes.api_objects import GPU_RESOURCE, LENDABLE_GPUS_LABEL, LENDABLE_LABEL, LOAN, parse_count
from scheduler.kubernetes.gpu_labels import GpuModel, NodeGpus, parse_node_gpus
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
from scheduler.runtime.served_models import check_served_models
from scheduler.scheduling.policies.quota import QueueUsage
from scheduler.solver.profiles.catalog import list_gpu_names, load_gpu


class DemandSourceKind(StrEnum):
    """Source of a pool's demand."""

    DEPLOYMENTS = "deployments"
    PROMETHEUS = "prometheus"
    PUSH = "push"
    REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class DemandSource:
    """Where a pool's demand comes from.

    `selector` are labels of Deployments. `prometheus` is set for the kinds prometheus and requests. Readings older than
    `stale_after_s` are stale.
    """

    kind: DemandSourceKind
    selector: Mapping[str, str] = field(default_factory=dict)
    prometheus: PrometheusDemand | None = None
    stale_after_s: float = DEMAND_STALE_S


@dataclass(frozen=True, slots=True)
class PoolResource:
    """A parsed Pool. Empty `gpu` and `gpu_memory_bytes` mean that the nodes' labels decide.

    `demand_conditions` are those in its current status. Training pods tolerate taints covered by `tolerations`.
    """

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
    """Parse the Pool.

    Raises:
        RefusedError: invalid fields; the message names each with its value and the accepted values.
    """
    meta = parse_metadata(resource)
    spec = parse_document(PoolSpec, resource.get("spec"))
    if spec.gpu and spec.gpu not in list_gpu_names():
        names = list_gpu_names()
        allowed = f"one of {', '.join(names)}{suggest(spec.gpu, names)}, or no gpu, so that labels decide"
        raise InvalidDocumentError(InvalidField("gpu", to_printable(spec.gpu), allowed))
    pool = pool_from_spec(meta.name, spec)
    check_served_models(pool.serving)
    return PoolResource(
        pool=pool,
        uid=meta.uid,
        selector=spec.node_selector,
        gpu=spec.gpu,
        gpu_memory_bytes=spec.gpu_memory,
        demand=_to_demand_source(spec.demand),
        demand_conditions=find_previous_condition(get_mapping(resource, "status").get("conditions"), DEMAND_KNOWN),
        tolerations=tuple(map(_to_toleration, spec.tolerations)),
    )


def parse_pools(resources: Iterable[Resource]) -> dict[str, PoolResource]:
    """Return the Pools by name. Invalid ones are left out."""
    pools = {}
    for resource in resources:
        try:
            pool = parse_pool(resource)
        except InvalidDocumentError:
            continue
        pools[pool.pool.name] = pool
    return pools


def build_pool_status(
    name: str, snapshot: Snapshot, *, conditions: Iterable[Condition], cordoned: Collection[str]
) -> dict[str, Any]:
    """Return the status without its time. `cordoned` are nodes that the cluster cordons, now or at the last update."""
    conditions = tuple(conditions)
    nodes = [node for node in snapshot.nodes.values() if node.pool == name]
    reading, shadow = snapshot.demand.get(name), snapshot.shadows.get(name)
    status = {
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "lentNodes": sum(snapshot.is_lent(node) for node in nodes),
        **_build_return_status(name, snapshot),
        "demandGpus": None if reading is None else f"{reading.asked_gpus:g}",
        "shadowNodes": None if shadow is None else len(shadow.nodes),
        "problem": next(
            (condition.reason for condition in conditions if condition.holds is (condition.type == CONFLICT)), None
        ),
        "serving": None
        if reading is None or not reading.advice
        else [_build_serving_status(each) for each in reading.advice],
        "cordonedNodes": sorted(node.name for node in nodes if node.cordoned and node.name in cordoned),
        "conditions": conditions,
    }
    return {key: value for key, value in status.items() if value is not None}


def _build_return_status(name: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return how many GPUs of recalled nodes come back to the pool, and when the last of them is due."""
    recalled = [loan for loan in snapshot.loans.values() if loan.pool == name and loan.state is LoanState.RECALLED]
    gpus = sum(loan.count_gpus(node) for loan in recalled if (node := snapshot.nodes.get(loan.node)) is not None)
    due_s = max((loan.return_by_s for loan in recalled if loan.return_by_s is not None), default=None)
    return {"returningGpus": gpus or None, "returnBy": None if due_s is None else format_time(due_s)}


def _build_serving_status(advice: ReplicaAdvice) -> dict[str, Any]:
    return {"model": advice.model, "proposedReplicas": advice.replicas}


def build_accepted_condition() -> Condition:
    return Condition(ACCEPTED, True, "Accepted")


def _to_toleration(spec: TolerationSpec) -> Toleration:
    return Toleration(spec.key, None if spec.operator == "Exists" else spec.value, spec.effect or "")


def _to_demand_source(spec: DemandSpec | None) -> DemandSource:
    if spec is None:
        return DemandSource(DemandSourceKind.PUSH)
    stale_after_s = DEMAND_STALE_S if spec.stale_after is None else spec.stale_after
    kind = DemandSourceKind(spec.source)
    is_polled = kind in (DemandSourceKind.PROMETHEUS, DemandSourceKind.REQUESTS)
    prometheus = prometheus_demand_from_spec(spec) if is_polled else None
    selector = spec.selector or {} if kind is DemandSourceKind.DEPLOYMENTS else {}
    return DemandSource(kind, selector, prometheus, stale_after_s)


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster. `gpus` are allocatable, `hardware` is what labels say of them; `taints` are complete."""

    name: str
    labels: Mapping[str, str]
    gpus: int
    is_cordoned: bool
    hardware: NodeGpus
    taints: tuple[Mapping[str, Any], ...] = ()

    def count_lendable_gpus(self) -> int | None:
        """Return how many GPUs a loan takes by the label of the node, 0 for all. None if the label is not valid."""
        text = self.labels.get(LENDABLE_GPUS_LABEL)
        if text is None:
            return 0
        count = parse_count(text)
        return count if 0 < count < self.gpus else None


def parse_cluster_node(node: Resource) -> ClusterNode:
    meta = parse_metadata(node)
    labels = meta.labels
    return ClusterNode(
        name=meta.name,
        labels=labels,
        gpus=_count_allocatable_gpus(node),
        is_cordoned=get_mapping(node, "spec").get("unschedulable") is True or meta.is_deleting,
        hardware=parse_node_gpus(labels),
        taints=tuple(get_mapping(node, "spec").get("taints") or ()),
    )


def to_fleet_node(cluster_node: ClusterNode, pool: PoolResource, gpu: GpuModel) -> Node:
    """Return the node as a fleet node, cordoned if nothing may start there.

    A node of an inference pool with taints that the pool does not tolerate is cordoned, so that it is not lent. On one
    of a training pool, only jobs that tolerate them run. A node with a label for lendable GPUs that is not valid is not
    lent: its owner does not want inference to leave it. What the node offers is observed later.
    """
    memory_bytes = pool.gpu_memory_bytes or gpu.memory_bytes or load_gpu(gpu.name).memory_bytes
    is_inference = pool.pool.kind is PoolKind.INFERENCE
    lendable_gpus = cluster_node.count_lendable_gpus() if is_inference else 0
    repels_all = is_inference and bool(find_untolerated_taints(cluster_node.taints, pool.tolerations))
    return Node(
        cluster_node.name,
        pool.pool.name,
        gpu.name,
        cluster_node.gpus,
        memory_bytes,
        cordoned=cluster_node.is_cordoned or repels_all,
        capacity=UNKNOWN_CAPACITY,
        lendable=cluster_node.labels.get(LENDABLE_LABEL, "").casefold() != "false" and lendable_gpus is not None,
        lendable_gpus=list_last_gpus(cluster_node.gpus, lendable_gpus or 0),
    )


def _count_allocatable_gpus(node: Resource) -> int:
    """Return the allocatable GPUs. GPUs that fail their health check are not allocatable."""
    text = str(get_mapping(get_mapping(node, "status"), "allocatable").get(GPU_RESOURCE, 0))
    return int(text) if text.isascii() and text.isdigit() else 0


def parse_queue(resource: Resource) -> JobQueue:
    """Parse the Queue.

    Raises:
        RefusedError: invalid fields; the message names each with its value and the accepted values.
    """
    return queue_from_spec(parse_metadata(resource).name, resource.get("spec"))


def build_queue_status(use: QueueUsage | None, conditions: Iterable[Condition]) -> dict[str, Any]:
    """Return the status without its time. `use` is None for a queue without jobs."""
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
    """Return the status. `usedGpus` and `jobs` include jobs that are leaving."""
    node = snapshot.nodes.get(loan.node)
    holders = snapshot.index.holders.get(loan.node, {}) if loan.is_live else {}
    status = {
        "state": loan.state.value,
        "stateSince": format_time(loan.state_since_s),
        "offeredAt": format_time(loan.offered_at_s),
        "returnBy": None if loan.return_by_s is None else format_time(loan.return_by_s),
        "gpus": None if node is None else loan.count_gpus(node),
        "usedGpus": len(holders),
        "jobs": ", ".join(sorted(set(holders.values()))) or None,
    }
    return {name: value for name, value in status.items() if value is not None}
