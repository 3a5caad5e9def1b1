"""A kubelet for many nodes that runs no containers, but admits, rejects and reports bound pods as a kubelet would.

It uses the real API server through KubernetesClient, ObjectCache, Reflector and WorkQueue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import (
    CONFIG_MAP,
    EVENT,
    GPU_RESOURCE,
    LEASE,
    NODE,
    POD,
    SECRET,
    VOLUME_CLAIM,
    Object,
    ObjectKey,
    is_terminating,
    key_of,
    name_of,
    namespace_of,
    uid_of,
)
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.object_cache import ObjectCache
from scheduler.kubernetes.reflector import Reflector
from tests.kubernetes.pod_admission import BROKEN_DEVICES, Rejection, find_rejection
from tests.kubernetes.work_queue import WorkQueue

LEASE_NAMESPACE = "kube-node-lease"
CONTAINER_CREATING = "ContainerCreating"
RETRY_S = 0.5
KILLED = 137
NODE_ADDRESS = "127.0.0.1"
"""Address of every node, and so of pods in its network. A test can serve there what a container would."""
_MOUNTED = (
    (VOLUME_CLAIM, "persistentVolumeClaim", "claimName", "persistentvolumeclaim"),
    (SECRET, "secret", "secretName", "secret"),
    (CONFIG_MAP, "configMap", "name", "configmap"),
)
"""Kinds of mounted objects: the volume's field, the field with the name, and kubelet's noun."""

log = logging.getLogger(__name__)


class FakeKubelet:
    """Reports bound pods as running and stops them.

    Args:
        stop_s: time that a pod takes to stop. A longer one than its grace period ends with exit code 137, else 0.
        on_start, on_stop, on_kill: called in the kubelet's thread when a pod starts, is asked to stop, and is killed.
        waiting_reason: why the pod's container cannot start yet, for example ErrImagePull. A pod that mounts a claim,
            Secret or ConfigMap that does not exist waits by itself.

    `rejections` are the pods that were not admitted, with their reasons; `admitted_count` counts the others. Nodes in
    `broken_nodes` admit no pod.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        *,
        stop_s: Callable[[Object], float] = lambda pod: 0.0,
        on_start: Callable[[Object], None] = lambda pod: None,
        on_stop: Callable[[Object], None] = lambda pod: None,
        on_kill: Callable[[Object], None] = lambda pod: None,
        waiting_reason: Callable[[Object], str] = lambda pod: "",
        lease_period_s: float = 5.0,
        silence_s: float = 10.0,
    ) -> None:
        self.stop_s = stop_s
        self.on_start = on_start
        self.on_stop = on_stop
        self.on_kill = on_kill
        self.waiting_reason = waiting_reason
        self.broken_nodes: set[str] = set()
        self.rejections: list[tuple[Object, Rejection]] = []
        self.admitted_count = 0
        self._admitted: dict[str, Object] = {}
        self._cluster = cluster
        self._lease_period_s = lease_period_s
        self._queue: WorkQueue[ObjectKey] = WorkQueue(base_s=0.1, cap_s=2.0)
        self.pods = ObjectCache(POD, field_selector="spec.nodeName!=", on_change=self._queue.add)
        self._watcher = Reflector(cluster, self.pods, idle_timeout_s=silence_s)
        self._addresses = _addresses()
        self._nodes: set[str] = set()
        self._silent: set[str] = set()
        self._exits: dict[str, int] = {}
        self._stopping_since_s: dict[str, float] = {}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name="kubelet-pods", daemon=True),
            threading.Thread(target=self._renew, name="kubelet-leases", daemon=True),
        ]

    def start(self) -> None:
        self._watcher.start()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, and remove the nodes and their pods."""
        self.close_quietly()
        for pod in self._cluster.list(POD, field_selector="spec.nodeName!=").items:
            if pod["spec"]["nodeName"] in self._nodes:
                self._remove(pod)
        for name in tuple(self._nodes):
            self.remove_node(name)

    def close_quietly(self) -> None:
        """Stop, and leave nodes and pods as they are."""
        self._stop.set()
        self._queue.close()
        self._watcher.stop()
        for thread in self._threads:
            thread.join()

    def add_node(
        self,
        name: str,
        *,
        gpus: int = 8,
        labels: dict[str, str] | None = None,
        capacity: dict[str, str] | None = None,
        taints: Sequence[dict[str, str]] = (),
    ) -> Object:
        """Add a Ready node with this GPU capacity. `capacity` replaces or adds other resources."""
        body = {"metadata": {"name": name, "labels": labels or {}}, "spec": {"taints": list(taints)}}
        self._cluster.create(NODE, body)
        self._cluster.apply(
            LEASE,
            {
                "metadata": {"name": name, "namespace": LEASE_NAMESPACE},
                "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now()},
            },
        )
        amounts = {GPU_RESOURCE: str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110", **(capacity or {})}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [_condition("Ready", "True")]}
        self._nodes.add(name)
        return self._cluster.patch_status(NODE, name, change={"status": status})

    def adopt_nodes(self, names: Iterable[str]) -> None:
        """Serve nodes that exist, as a kubelet does after its restart."""
        self._nodes |= set(names)

    def fail_node(self, name: str) -> None:
        """Make the node silent, as the node lifecycle controller would see it. Its pods keep their last status."""
        self._silent.add(name)
        self._set_ready(name, "Unknown")

    def heal_node(self, name: str) -> None:
        self._silent.discard(name)
        self._set_ready(name, "True")
        for key in self.pods.snapshot():
            self._queue.add(key)

    def remove_node(self, name: str) -> None:
        """Delete the node. Its pods stay until they are deleted without grace period."""
        self._nodes.discard(name)
        self._cluster.delete(NODE, name)
        self._cluster.delete(LEASE, name, LEASE_NAMESPACE)

    def finish(self, pod: Object, exit_code: int) -> None:
        """Let the pod's container exit by itself."""
        self._exits[uid_of(pod)] = exit_code
        self._queue.add(key_of(pod))

    def _work(self) -> None:
        while not self._stop.is_set():
            key = self._queue.take(1.0)
            if key is None:
                continue
            try:
                self._look_at(key)
                self._queue.forget(key)
            except ApiError as error:
                log.info("pod %s comes again: %s", key, error)
                self._queue.add_failed(key)
            finally:
                self._queue.done(key)

    def _look_at(self, key: ObjectKey) -> None:
        namespace, name = key
        pod = self.pods.get(name, namespace)
        if pod is None or pod["spec"]["nodeName"] not in self._nodes - self._silent:
            return
        phase = pod["status"].get("phase", "Pending")
        if is_terminating(pod):
            self._end(pod, phase)
        elif uid_of(pod) in self._exits and phase != "Pending":
            if phase == "Running":
                self._report_exit(pod, self._exits[uid_of(pod)])
        elif phase == "Pending":
            self._start_pod(key, pod)

    def _start_pod(self, key: ObjectKey, pod: Object) -> None:
        if uid_of(pod) not in self._admitted:
            node = pod["spec"]["nodeName"]
            others = [
                each for each in self._admitted.values() if each["spec"]["nodeName"] == node and self._exists(each)
            ]
            broken = BROKEN_DEVICES if node in self.broken_nodes else None
            if rejection := broken or find_rejection(pod, self._cluster.get(NODE, node), others):
                self.rejections.append((pod, rejection))
                self._report(pod, {"phase": "Failed", "reason": rejection[0], "message": rejection[1]})
                return
            self._admitted[uid_of(pod)] = pod
            self.admitted_count += 1
        missing = self._find_missing(pod)
        if missing:
            self._report_missing(pod, missing)
        if reason := self.waiting_reason(pod) or (CONTAINER_CREATING if missing else ""):
            self._report(pod, _waiting(pod, reason))
            self._queue.add_after(key, RETRY_S)
            return
        address = NODE_ADDRESS if pod["spec"].get("hostNetwork") else next(self._addresses)
        self._report(pod, _running(pod, address))
        self.on_start(pod)

    def _exists(self, pod: Object) -> bool:
        """Return whether nobody has deleted the pod without a grace period."""
        current = self.pods.get(name_of(pod), namespace_of(pod))
        return current is not None and uid_of(current) == uid_of(pod)

    def _find_missing(self, pod: Object) -> str:
        """Return the object of a volume that does not exist, in kubelet's words. Ebbtide's own objects exist."""
        for volume in pod["spec"].get("volumes", ()):
            for kind, field, name_field, noun in _MOUNTED:
                source = volume.get(field) or {}
                name = str(source.get(name_field, ""))
                is_wanted = name and not source.get("optional") and not volume["name"].startswith("ebbtide-")
                if is_wanted and self._cluster.get_or_none(kind, name, namespace_of(pod)) is None:
                    return f'MountVolume.SetUp failed for volume "{volume["name"]}" : {noun} "{name}" not found'
        return ""

    def _report_missing(self, pod: Object, message: str) -> None:
        """Record an Event once, as kubelet does with each attempt to mount."""
        name = f"{name_of(pod)}.mount"
        if self._cluster.get_or_none(EVENT, name, namespace_of(pod)) is None:
            regarding = {"kind": "Pod", "namespace": namespace_of(pod), "name": name_of(pod), "uid": uid_of(pod)}
            facts = {"type": "Warning", "reason": "FailedMount", "note": message, "eventTime": _now()}
            reporter = {"action": "Mount", "reportingController": "kubelet", "reportingInstance": "fake"}
            meta = {"name": name, "namespace": namespace_of(pod)}
            self._cluster.create(EVENT, {"metadata": meta, "regarding": regarding, **facts, **reporter})

    def _end(self, pod: Object, phase: str) -> None:
        uid, now_s = uid_of(pod), time.monotonic()
        if uid not in self._stopping_since_s:
            self._stopping_since_s[uid] = now_s
            self.on_stop(pod)
        grace_s = float(pod["metadata"]["deletionGracePeriodSeconds"])
        needs_s = self.stop_s(pod) if phase == "Running" else 0.0
        left_s = self._stopping_since_s[uid] + min(needs_s, grace_s) - now_s
        if left_s > 0:
            self._queue.add_after(key_of(pod), left_s)
            return
        if phase == "Running":
            if needs_s > grace_s:
                self.on_kill(pod)
            self._report_exit(pod, self._exits.get(uid, KILLED if needs_s > grace_s else 0))
        self._remove(pod)

    def _report_exit(self, pod: Object, exit_code: int) -> None:
        self._admitted.pop(uid_of(pod), None)
        self._report(pod, _exited(pod, exit_code))

    def _report(self, pod: Object, status: Object) -> None:
        try:
            written = self._cluster.patch_status(POD, name_of(pod), namespace_of(pod), change={"status": status})
        except ApiError as error:
            if not error.is_not_found:
                raise
            return
        self.pods.assume(written)

    def _remove(self, pod: Object) -> None:
        self._admitted.pop(uid_of(pod), None)
        left = self._cluster.delete(POD, name_of(pod), namespace_of(pod), uid=uid_of(pod), grace_period_s=0)
        if left is None:
            self.pods.assume_deleted(pod)

    def _set_ready(self, name: str, status: str) -> None:
        self._cluster.patch_status(NODE, name, change={"status": {"conditions": [_condition("Ready", status)]}})

    def _renew(self) -> None:
        while not self._stop.wait(self._lease_period_s):
            for name in self._nodes - self._silent:
                try:
                    self._cluster.patch(LEASE, name, LEASE_NAMESPACE, change={"spec": {"renewTime": _now()}})
                except ApiError as error:
                    log.info("the lease of %s was not renewed: %s", name, error)


def _running(pod: Object, address: str) -> Object:
    conditions = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": _now_s(),
        "conditions": [_condition(each, "True") for each in conditions],
        "containerStatuses": _containers(pod, is_ready=True, state={"running": {"startedAt": _now_s()}}),
    }


def _waiting(pod: Object, reason: str) -> Object:
    """Return the status of a pod whose container waits. While it is being created, its volumes are not ready."""
    is_prepared = str(reason != CONTAINER_CREATING)
    return {
        "phase": "Pending",
        "startTime": _now_s(),
        "conditions": [_condition("PodScheduled", "True"), _condition("PodReadyToStartContainers", is_prepared)],
        "containerStatuses": _containers(pod, is_ready=False, state={"waiting": {"reason": reason}}),
    }


def _exited(pod: Object, exit_code: int) -> Object:
    """Return a status in which all containers have exited with this code."""
    ended = {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed", "finishedAt": _now_s()}
    return {
        "phase": "Failed" if exit_code else "Succeeded",
        "conditions": [
            *(_condition(each, "True") for each in ("PodScheduled", "Initialized")),
            *(_condition(each, "False") for each in ("ContainersReady", "Ready")),
        ],
        "containerStatuses": _containers(pod, is_ready=False, state={"terminated": ended}),
    }


def _containers(pod: Object, *, is_ready: bool, state: Object) -> list[Object]:
    text = {"imageID": "", "restartCount": 0, "ready": is_ready, "started": is_ready, "state": state}
    return [{"name": each["name"], "image": each["image"], **text} for each in pod["spec"]["containers"]]


def _condition(what: str, status: str) -> Object:
    return {"type": what, "status": status, "reason": "FakeKubelet", "message": "", "lastTransitionTime": _now_s()}


def _addresses() -> Iterator[str]:
    for number in count(2):
        yield f"10.{1 + number // 65536}.{number // 256 % 256}.{number % 256}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _now_s() -> str:
    """Return the current time in whole seconds, as in all timestamps except those of Leases."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
