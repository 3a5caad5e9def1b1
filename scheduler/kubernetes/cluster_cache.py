"""ClusterCache: local copies of everything that the operator watches, and the view that the executor works on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from scheduler.domain.quantities import Resources, freeze_resources, sum_resources
from scheduler.kubernetes.api_objects import (
    CONFIG_MAP,
    ELASTIC_JOB,
    GENERATION_LABEL,
    GPU_PROFILE,
    JOB_LABEL,
    LOAN,
    MANAGED_BY_LABEL,
    NODE,
    POD,
    POOL,
    QUEUE,
    SCHEDULER_NAME,
    SERVICE,
    Object,
    ResourceKind,
    labels_of,
    parse_count,
    strip_managed_fields,
)
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.node_view import NodeView, Toleration, parse_node_view
from scheduler.kubernetes.object_cache import ObjectCache
from scheduler.kubernetes.pod_changes import group_by_job
from scheduler.kubernetes.pod_view import PodView, parse_pod_view
from scheduler.kubernetes.reflector import Reflector
from scheduler.kubernetes.resources.elastic_job import derive_job_id, is_managed_by_us
from scheduler.kubernetes.resources.fleet import parse_pools
from scheduler.kubernetes.resources.meta import parse_metadata
from scheduler.kubernetes.spec_commands import ClusterResources


class PodIdentity(Protocol):
    """Identity of a pod."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PlanConfigMap:
    """The ConfigMap with a job's plan, and the generation of that plan."""

    job_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster at one moment.

    `pods` are all pods that request GPUs or belong to Ebbtide. `elastic_jobs` are keyed by namespace and claimed job
    id. `services` (job id) and `plans` are keyed by (namespace, name). `tolerations` are keyed by Pool.
    `other_requests` are the requests, by node, of pods that are not among `pods`. `standby_candidates` are all foreign
    pods in the namespaces of standby replicas, and `prefetch_pods` those that load images or weights onto nodes.
    """

    pods: tuple[PodView, ...] = ()
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    elastic_jobs: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    services: Mapping[tuple[str, str], str] = field(default_factory=dict)
    plans: Mapping[tuple[str, str], PlanConfigMap] = field(default_factory=dict)
    tolerations: Mapping[str, tuple[Toleration, ...]] = field(default_factory=dict)
    other_requests: Mapping[str, Resources] = field(default_factory=dict)
    standby_candidates: tuple[PodView, ...] = ()
    prefetch_pods: tuple[PodView, ...] = ()

    def pods_by_job(self) -> dict[str, list[PodView]]:
        return group_by_job(self.pods)

    def with_verified_namespaces(self, job_namespaces: Mapping[str, str]) -> ClusterView:
        """Return a view in which a pod belongs to a job only in that job's namespace.

        Anyone who can create pods elsewhere can copy our labels; such pods count as foreign.
        """
        pods = tuple(
            pod if job_namespaces.get(pod.job_id, pod.namespace) == pod.namespace else replace(pod, job_id="")
            for pod in self.pods
        )
        return replace(self, pods=pods)


_MANAGED_SELECTOR = f"{MANAGED_BY_LABEL}={SCHEDULER_NAME}"
_VIEW_KEY = "facts"
_METADATA_FIELDS = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "labels",
    "annotations",
    "deletionTimestamp",
    "ownerReferences",
)


class ClusterCache:
    """Caches and watches of all resource kinds that the operator reads."""

    def __init__(self, cluster: KubernetesClient) -> None:
        self.pods = ObjectCache(POD, transform=_trim_pod)
        self.nodes = ObjectCache(NODE, transform=_trim_node)
        self.services = ObjectCache(SERVICE, label_selector=_MANAGED_SELECTOR, transform=_trim_metadata)
        self.plans = ObjectCache(CONFIG_MAP, label_selector=_MANAGED_SELECTOR, transform=_trim_metadata)
        self.jobs = ObjectCache(ELASTIC_JOB)
        self.pools = ObjectCache(POOL)
        self.queues = ObjectCache(QUEUE)
        self.loans = ObjectCache(LOAN)
        self.gpu_profiles = ObjectCache(GPU_PROFILE)
        self._by_kind = {cache.kind: cache for cache in self._caches()}
        self._reflectors = [Reflector(cluster, cache) for cache in self._caches()]
        self._lock = threading.Lock()
        self._bound: dict[str, str] = {}
        self._view_change_counts: tuple[object, ...] = ()
        self._view = ClusterView()
        self._last_change_count = 0

    def start(self) -> None:
        for reflector in self._reflectors:
            reflector.start()

    def stop(self) -> None:
        for reflector in self._reflectors:
            reflector.stop()

    def wait_for_sync(self, timeout_s: float) -> bool:
        return all(cache.wait_for_sync(timeout_s) for cache in self._caches())

    @property
    def stale_kinds(self) -> tuple[ResourceKind, ...]:
        """Kinds whose watch had no contact for too long."""
        return tuple(reflector.cache.kind for reflector in self._reflectors if reflector.is_stale)

    @property
    def has_synced(self) -> bool:
        """Whether every cache holds a complete list."""
        return not self.unlisted_kinds

    @property
    def unlisted_kinds(self) -> tuple[ResourceKind, ...]:
        """Kinds without a complete list yet."""
        return tuple(cache.kind for cache in self._caches() if not cache.has_synced)

    @property
    def seconds_since_contact(self) -> Mapping[str, float]:
        """Seconds since the last contact with the API server, by resource."""
        return {reflector.cache.kind.plural: reflector.seconds_since_contact for reflector in self._reflectors}

    @property
    def kinds_with_dead_watch(self) -> tuple[ResourceKind, ...]:
        """Resource kinds whose watch thread has died."""
        return tuple(reflector.cache.kind for reflector in self._reflectors if reflector.has_died)

    @property
    def change_count(self) -> int:
        """A counter that grows with every change in any cache."""
        return sum(cache.change_count for cache in self._caches())

    def has_pending_changes(self) -> bool:
        """Return whether a pod or node changed since the last call. Cheap."""
        changes = self.pods.change_count + self.nodes.change_count
        before, self._last_change_count = self._last_change_count, changes
        return changes != before

    @property
    def jobs_with_pods(self) -> frozenset[tuple[str, str]]:
        """(namespace, job id) of jobs with pods, ended pods included.

        Includes the namespace, because labels can be forged.
        """
        return frozenset((pod.namespace, pod.job_id) for pod in self.get_view().pods if pod.is_ours)

    def list_resources(self) -> ClusterResources:
        """Return all custom resources and nodes."""
        caches = (self.jobs, self.pools, self.queues, self.loans, self.nodes, self.gpu_profiles)
        return ClusterResources(*(tuple(cache.snapshot().values()) for cache in caches))

    def assume(self, kind: ResourceKind, item: Object) -> None:
        """Store the API server's response to our own write ahead of the watch, if the kind is cached."""
        cache = self._by_kind.get(kind)
        if cache is not None:
            cache.assume(item)

    def assume_bound(self, pod: PodView) -> None:
        """Record an acknowledged binding, whose response does not contain the pod, until the watch confirms it."""
        with self._lock:
            self._bound[pod.uid] = pod.target_node
            self._view_change_counts = ()

    def assume_deleted(self, pod: PodIdentity) -> None:
        self.pods.assume_deleted({"metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid}})

    def get_view(self) -> ClusterView:
        """Return the current view. Rebuilt only after a change."""
        caches = (self.pods, self.nodes, self.services, self.plans, self.jobs, self.pools)
        change_counts = tuple(cache.change_count for cache in caches)
        with self._lock:
            if change_counts != self._view_change_counts:
                self._view = self._build_view()
                self._view_change_counts = change_counts
            return self._view

    def _build_view(self) -> ClusterView:
        views: list[PodView] = [item[_VIEW_KEY] for item in self.pods.snapshot().values()]
        unbound = {pod.uid for pod in views if not pod.node}
        self._bound = {uid: node for uid, node in self._bound.items() if uid in unbound}
        pods = [self._with_binding(pod) for pod in views]
        pools = parse_pools(self.pools.snapshot().values())
        standbys = (pool.pool.lending.standby for pool in pools.values())
        namespaces = {standby.namespace for standby in standbys if standby is not None}
        return ClusterView(
            pods=tuple(pod for pod in pods if pod.gpus or pod.is_ours),
            nodes={item["metadata"]["name"]: item[_VIEW_KEY] for item in self.nodes.snapshot().values()},
            elastic_jobs=_index_by_job_id(self.jobs.snapshot().values()),
            services={key: labels_of(item).get(JOB_LABEL, "") for key, item in self.services.snapshot().items()},
            plans={key: _parse_plan(item) for key, item in self.plans.snapshot().items()},
            tolerations={name: pool.tolerations for name, pool in pools.items()},
            other_requests=sum_requests_by_node(pod for pod in pods if not pod.gpus and not pod.is_ours),
            prefetch_pods=tuple(pod for pod in pods if pod.prefetch is not None),
            standby_candidates=tuple(
                pod for pod in pods if pod.namespace in namespaces and not pod.is_ours and pod.prefetch is None
            ),
        )

    def _with_binding(self, pod: PodView) -> PodView:
        node = self._bound.get(pod.uid)
        return replace(pod, node=node) if node is not None and not pod.node else pod

    def _caches(self) -> tuple[ObjectCache, ...]:
        own = (self.jobs, self.pools, self.queues, self.loans, self.gpu_profiles)
        return (self.pods, self.nodes, self.services, self.plans, *own)


def _index_by_job_id(resources: Iterable[Object]) -> dict[tuple[str, str], Object]:
    metas = ((parse_metadata(each), each) for each in resources if is_managed_by_us(each))
    return {(meta.namespace, derive_job_id(meta)): each for meta, each in metas}


def sum_requests_by_node(pods: Iterable[PodView]) -> dict[str, Resources]:
    """Return the requests of pods that have not ended, by node."""
    requests: dict[str, list[Resources]] = {}
    for pod in pods:
        if pod.node and not pod.has_ended:
            requests.setdefault(pod.node, []).append(pod.requests)
    return {node: _sum_requests(tuple(each)) for node, each in requests.items()}


@lru_cache(maxsize=65536)
def _sum_requests(requests: tuple[Resources, ...]) -> Resources:
    """Return the sum. Most nodes have the same pods, those of DaemonSets, and share one object."""
    return freeze_resources(sum_resources(requests))


def _parse_plan(item: Object) -> PlanConfigMap:
    generation = parse_count(labels_of(item).get(GENERATION_LABEL), default=-1)
    return PlanConfigMap(labels_of(item).get(JOB_LABEL, ""), generation)


def _trim_metadata(item: Object) -> Object:
    return {"metadata": {name: item["metadata"][name] for name in _METADATA_FIELDS if name in item["metadata"]}}


def _trim_pod(item: Object) -> Object:
    view = parse_pod_view(item)
    trimmed: dict[str, Any] = _trim_metadata(item)
    return {**trimmed, _VIEW_KEY: view}


def _trim_node(item: Object) -> Object:
    """Drop images and other fields that are large and unused."""
    status = {name: item.get("status", {}).get(name) for name in ("allocatable", "conditions")}
    return {**strip_managed_fields(item), "status": status, _VIEW_KEY: parse_node_view(item)}
