"""A cluster in memory: the calls that the executor makes, and a kubelet that admits pods as a real one does."""

from __future__ import annotations

import copy
import threading
from itertools import count
from typing import Any

from scheduler.kubernetes.api_objects import NODE, POD, Object, ResourceKind, key_of, uid_of
from scheduler.kubernetes.cluster_cache import ClusterView, sum_requests_by_node
from scheduler.kubernetes.node_view import NodeView, parse_node_view
from scheduler.kubernetes.pod_view import PodView, parse_pod_view
from tests.kubernetes.pod_admission import BROKEN_DEVICES, Rejection, find_rejection, find_scheduling_misfit

Key = tuple[str, str, str]


class PodList:
    """The pods, as a kubelet's cache holds them."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    def snapshot(self) -> dict[tuple[str, str], Object]:
        return {key_of(pod): pod for pod in self._cluster.list_pods()}


class MemoryCluster:
    """Client, cache and kubelet in one. Writes take effect at once, and `run_kubelets` admits bound pods.

    `misfits` are reasons why the Kubernetes scheduler would not have chosen the node of an admitted pod. Nodes in
    `broken_nodes` admit no pod.
    """

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.rejections: list[tuple[Object, Rejection]] = []
        self.misfits: list[str] = []
        self.broken_nodes: set[str] = set()
        self.admitted_count = 0
        self.pods = PodList(self)
        self._admitted: set[str] = set()
        self._uids = count(1)
        self._lock = threading.RLock()
        self._pod_views: dict[str, tuple[Object, PodView]] = {}
        self._node_views: dict[str, tuple[Object, NodeView]] = {}

    def create_dry(self, kind: ResourceKind, item: Object) -> Object:
        """Accept every object as it is."""
        return item

    def create(self, kind: ResourceKind, body: Object) -> Object:
        with self._lock:
            return self._put(kind, {"status": {}, **body})

    def apply(self, kind: ResourceKind, body: Object) -> Object:
        return self.create(kind, body)

    def get_or_none(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        with self._lock:
            return self.objects.get((kind.name, namespace, name))

    def bind(self, pod: Object, node: str) -> None:
        with self._lock:
            bound = copy.deepcopy(self.objects[(POD.name, *key_of(pod))])
            bound["spec"]["nodeName"] = node
            self._put(POD, bound)

    def delete(
        self, kind: ResourceKind, name: str, namespace: str = "", *, uid: str = "", grace_period_s: float | None = None
    ) -> Object | None:
        """Delete at once: processes of pods end without delay."""
        with self._lock:
            gone = self.objects.get((kind.name, namespace, name))
            if gone is not None and (not uid or uid_of(gone) == uid):
                del self.objects[kind.name, namespace, name]
                self._admitted.discard(uid_of(gone))
        return None

    def assume(self, kind: ResourceKind, item: Object) -> None:
        """Do nothing: writes are visible at once."""

    def assume_bound(self, pod: PodView) -> None:
        """Do nothing: writes are visible at once."""

    def assume_deleted(self, pod: PodView) -> None:
        """Do nothing: writes are visible at once."""

    def add_node(
        self, name: str, *, gpus: int, capacity: dict[str, str], labels: dict[str, str], taints: list[dict[str, str]]
    ) -> None:
        allocatable = {"nvidia.com/gpu": str(gpus), **capacity}
        conditions = [{"type": "Ready", "status": "True"}]
        self.create(
            NODE,
            {
                "metadata": {"name": name, "labels": labels},
                "spec": {"taints": taints},
                "status": {"allocatable": allocatable, "conditions": conditions},
            },
        )

    def list_pods(self) -> list[Object]:
        with self._lock:
            return [item for (kind, _, _), item in self.objects.items() if kind == POD.name]

    def run_kubelets(self) -> None:
        """Admit, reject or start each bound pod."""
        with self._lock:
            by_node: dict[str, list[Object]] = {}
            for pod in self.list_pods():
                if uid_of(pod) in self._admitted and pod["status"].get("phase") == "Running":
                    by_node.setdefault(pod["spec"]["nodeName"], []).append(pod)
            for pod in self.list_pods():
                node = self.objects.get((NODE.name, "", pod["spec"].get("nodeName", "")))
                if node is None or pod["status"].get("phase", "Pending") != "Pending":
                    continue
                others = by_node.setdefault(node["metadata"]["name"], [])
                broken = BROKEN_DEVICES if node["metadata"]["name"] in self.broken_nodes else None
                if rejection := broken or find_rejection(pod, node, others):
                    self.rejections.append((pod, rejection))
                    status: Any = {"phase": "Failed", "reason": rejection[0], "message": rejection[1]}
                else:
                    self.admitted_count += 1
                    self._admitted.add(uid_of(pod))
                    if misfit := find_scheduling_misfit(pod, node):
                        self.misfits.append(misfit)
                    status = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
                running = {**pod, "status": status}
                self._put(POD, running)
                if status["phase"] == "Running":
                    others.append(running)

    def get_view(self) -> ClusterView:
        with self._lock:
            pods = [self._pod_view(pod) for pod in self.list_pods()]
            nodes = [item for (kind, _, _), item in self.objects.items() if kind == NODE.name]
            return ClusterView(
                pods=tuple(pod for pod in pods if pod.gpus or pod.is_ours),
                nodes={node["metadata"]["name"]: self._view_of(node) for node in nodes},
                other_requests=sum_requests_by_node(pod for pod in pods if not pod.gpus and not pod.is_ours),
            )

    def _pod_view(self, pod: Object) -> PodView:
        known = self._pod_views.get(uid_of(pod))
        if known is None or known[0] is not pod:
            known = self._pod_views[uid_of(pod)] = (pod, parse_pod_view(pod))
        return known[1]

    def _view_of(self, node: Object) -> NodeView:
        name = node["metadata"]["name"]
        if name not in self._node_views or self._node_views[name][0] is not node:
            self._node_views[name] = (node, parse_node_view(node))
        return self._node_views[name][1]

    def _put(self, kind: ResourceKind, body: Object) -> Object:
        meta = body["metadata"]
        meta = {**meta, "uid": meta.get("uid") or f"uid-{next(self._uids)}", "resourceVersion": str(next(self._uids))}
        item = {**body, "metadata": meta}
        self.objects[kind.name, meta.get("namespace", ""), meta["name"]] = item
        return item
