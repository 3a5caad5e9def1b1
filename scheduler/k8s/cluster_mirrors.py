"""The mirrors of a cluster that the operator keeps, and the view that the executor has of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from scheduler.k8s.client import Cluster
from scheduler.k8s.cluster_view import ClusterView, SeenPlan
from scheduler.k8s.intake import Resources
from scheduler.k8s.kinds import (
    CONFIG_MAP,
    ELASTIC_JOB,
    GENERATION_LABEL,
    JOB_LABEL,
    LOAN,
    MANAGED_BY_LABEL,
    NODE,
    POD,
    POOL,
    QUEUE,
    SCHEDULER_NAME,
    SERVICE,
    Kind,
)
from scheduler.k8s.mirror import Mirror
from scheduler.k8s.node_view import node_view
from scheduler.k8s.objects import Object, labels_of, lean, number_of
from scheduler.k8s.pod_facts import PodFacts, pod_facts
from scheduler.k8s.resources.elastic_job import is_managed_by_us, job_id_of
from scheduler.k8s.resources.metadata import metadata
from scheduler.k8s.resources.pool import tolerations_of
from scheduler.k8s.watching import Watcher

_OURS = f"{MANAGED_BY_LABEL}={SCHEDULER_NAME}"
_FACTS = "facts"
_KEPT = ("name", "namespace", "uid", "resourceVersion", "labels", "annotations", "deletionTimestamp", "ownerReferences")


class ClusterMirrors:
    """Everything that the operator watches."""

    def __init__(self, cluster: Cluster) -> None:
        self.pods = Mirror(POD, slim=_slim_pod)
        self.nodes = Mirror(NODE, slim=_slim_node)
        self.services = Mirror(SERVICE, labels=_OURS, slim=_slim_metadata)
        self.plans = Mirror(CONFIG_MAP, labels=_OURS, slim=_slim_metadata)
        self.jobs = Mirror(ELASTIC_JOB)
        self.pools = Mirror(POOL)
        self.queues = Mirror(QUEUE)
        self.loans = Mirror(LOAN)
        self._by_kind = {mirror.kind: mirror for mirror in self._all()}
        self._watchers = [Watcher(cluster, mirror) for mirror in self._all()]
        self._lock = threading.Lock()
        self._bound: dict[str, str] = {}
        self._seen: tuple[object, ...] = ()
        self._view = ClusterView()
        self._news_at = 0

    def start(self) -> None:
        for watcher in self._watchers:
            watcher.start()

    def stop(self) -> None:
        for watcher in self._watchers:
            watcher.stop()

    def wait_synced(self, timeout_s: float) -> bool:
        return all(mirror.wait_synced(timeout_s) for mirror in self._all())

    @property
    def stale(self) -> tuple[Kind, ...]:
        """Kinds of which nothing was heard for too long."""
        return tuple(watcher.mirror.kind for watcher in self._watchers if watcher.is_stale)

    @property
    def are_synced(self) -> bool:
        """Every mirror has taken in a whole list."""
        return not self.unlisted

    @property
    def unlisted(self) -> tuple[Kind, ...]:
        """Kinds of which no whole list has come yet."""
        return tuple(mirror.kind for mirror in self._all() if not mirror.is_synced)

    @property
    def silent_s(self) -> Mapping[str, float]:
        """How long ago the API server was last heard, by resource."""
        return {watcher.mirror.kind.plural: watcher.silent_s for watcher in self._watchers}

    @property
    def unwatched(self) -> tuple[Kind, ...]:
        """Kinds that nobody will ever hear of again: a fault of ours has ended the thread that watched."""
        return tuple(watcher.mirror.kind for watcher in self._watchers if watcher.has_died)

    @property
    def changes(self) -> int:
        """Grows with every change of what is mirrored."""
        return sum(mirror.changes for mirror in self._all())

    def has_news(self) -> bool:
        """Whether a pod or a node has changed since this was last asked. Cheap."""
        changes = self.pods.changes + self.nodes.changes
        had, self._news_at = self._news_at, changes
        return changes != had

    @property
    def podded(self) -> frozenset[tuple[str, str]]:
        """Jobs that have pods, ended ones too, by namespace and id: a pod elsewhere can say what it likes."""
        return frozenset((pod.namespace, pod.job_id) for pod in self.view().pods if pod.is_ours)

    def resources(self) -> Resources:
        """What users and administrators have asked for, and the nodes."""
        every = (self.jobs, self.pools, self.queues, self.loans, self.nodes)
        return Resources(*(tuple(mirror.snapshot().values()) for mirror in every))

    def put_ahead(self, kind: Kind, item: Object) -> None:
        """Take in the API server's answer to a write of ours, if it is of a kind that is mirrored."""
        mirror = self._by_kind.get(kind)
        if mirror is not None:
            mirror.put_ahead(item)

    def pod_bound(self, pod: PodFacts) -> None:
        """A binding was acknowledged: its answer shows no pod, so it is noted until the watch tells of it."""
        with self._lock:
            self._bound[pod.uid] = pod.wanted_node
            self._seen = ()

    def pod_gone(self, pod: PodFacts) -> None:
        self.pods.remove_ahead({"metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid}})

    def view(self) -> ClusterView:
        """The cluster as it is known now. Made anew only after a change."""
        mirrors = (self.pods, self.nodes, self.services, self.plans, self.jobs, self.pools)
        seen = tuple(mirror.changes for mirror in mirrors)
        with self._lock:
            if seen != self._seen:
                self._view = self._make_view()
                self._seen = seen
            return self._view

    def _make_view(self) -> ClusterView:
        facts: list[PodFacts] = [item[_FACTS] for item in self.pods.snapshot().values()]
        unbound = {pod.uid for pod in facts if not pod.node}
        self._bound = {uid: node for uid, node in self._bound.items() if uid in unbound}
        pods = [self._with_binding(pod) for pod in facts]
        return ClusterView(
            pods=tuple(pod for pod in pods if pod.gpus or pod.is_ours),
            nodes={item["metadata"]["name"]: node_view(item) for item in self.nodes.snapshot().values()},
            resources=_by_job_id(self.jobs.snapshot().values()),
            services={key: labels_of(item).get(JOB_LABEL, "") for key, item in self.services.snapshot().items()},
            plans={key: _plan(item) for key, item in self.plans.snapshot().items()},
            tolerations=tolerations_of(self.pools.snapshot().values()),
        )

    def _with_binding(self, pod: PodFacts) -> PodFacts:
        node = self._bound.get(pod.uid)
        return replace(pod, node=node) if node is not None and not pod.node else pod

    def _all(self) -> tuple[Mirror, ...]:
        own = (self.jobs, self.pools, self.queues, self.loans)
        return (self.pods, self.nodes, self.services, self.plans, *own)


def _by_job_id(resources: Iterable[Object]) -> dict[tuple[str, str], Object]:
    metas = ((metadata(each), each) for each in resources if is_managed_by_us(each))
    return {(meta.namespace, job_id_of(meta)): each for meta, each in metas}


def _plan(item: Object) -> SeenPlan:
    generation = number_of(labels_of(item).get(GENERATION_LABEL), otherwise=-1)
    return SeenPlan(labels_of(item).get(JOB_LABEL, ""), generation)


def _slim_metadata(item: Object) -> Object:
    return {"metadata": {name: item["metadata"][name] for name in _KEPT if name in item["metadata"]}}


def _slim_pod(item: Object) -> Object:
    facts = pod_facts(item)
    slim: dict[str, Any] = _slim_metadata(item)
    return {**slim, _FACTS: facts}


def _slim_node(item: Object) -> Object:
    """Without its images and the rest of what takes room and tells us nothing."""
    status = {name: item.get("status", {}).get(name) for name in ("allocatable", "conditions")}
    return {**lean(item), "status": status}
