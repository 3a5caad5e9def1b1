"""Preparation of an uninstallation: everything that Ebbtide would leave behind in the cluster is stopped and released.

Without an operator, a lent node would keep its taint, an object with a finalizer could not be deleted, and pods of jobs
would hold GPUs until they notice that no API answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from scheduler.documents.custom_resource import PoolSpec
from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.standby import standby_from_spec
from scheduler.domain.standby import Standby
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import (
    ELASTIC_JOB,
    EPOCH_ANNOTATION,
    GPU_PROFILE,
    GPU_PROFILE_FINALIZER,
    JOB_FINALIZER,
    JOB_LABEL,
    LEASE,
    LOAN,
    LOAN_LABEL,
    LOANED_TAINT_KEY,
    MANAGED_BY_LABEL,
    NODE,
    POD,
    POOL,
    POOL_FINALIZER,
    PREFETCH_LABEL,
    QUEUE,
    QUEUE_FINALIZER,
    SCHEDULER_NAME,
    Object,
    ObjectKey,
    ResourceKind,
    annotations_of,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    uid_of,
)
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.leader_election import OPERATOR_LEASE, LeaseTimings
from scheduler.kubernetes.resources.elastic_job import is_managed_by_us
from scheduler.kubernetes.resources.elastic_job_status import has_ended_phase
from scheduler.kubernetes.resources.meta import get_mapping

logger = logging.getLogger(__name__)

LEASE_TAKEN_S = 600
"""Duration of the Lease during the preparation, longer than it takes in a large cluster."""
LEASE_KEPT_S = 60
"""Duration of the Lease after the preparation, in which Helm deletes the operator before a replica could lead again."""
POLL_S = 1.0
ATTEMPTS_MAX = 5
_LISTED_MAX = 10
_END_PHASES = ("Succeeded", "Failed")
_FINALIZERS = (
    (ELASTIC_JOB, JOB_FINALIZER),
    (POOL, POOL_FINALIZER),
    (QUEUE, QUEUE_FINALIZER),
    (GPU_PROFILE, GPU_PROFILE_FINALIZER),
)


class UninstallationError(Exception):
    """The cluster is not released. The message says what holds it and what to do."""


@dataclass(frozen=True, slots=True)
class ClusterUse:
    """What jobs hold in the cluster: live pods as namespace/name, and lent nodes."""

    pods: tuple[str, ...]
    lent_nodes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.pods or self.lent_nodes)

    def __str__(self) -> str:
        used = {"pods of jobs": self.pods, "lent nodes": self.lent_nodes}
        return "; ".join(f"{noun}: {_format(names)}" for noun, names in used.items() if names)


class Uninstallation:
    """Steps of the preparation, on one cluster.

    Args:
        lease_namespace: namespace of the Lease for which replicas of the operator compete.
        identity: holder of the Lease during the preparation.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        *,
        lease_namespace: str,
        identity: str,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cluster = cluster
        self._lease_namespace = lease_namespace
        self._identity = identity
        self._monotonic_s = monotonic_s
        self._sleep = sleep

    def prepare(self, *, stops_jobs: bool, timeout_s: float) -> None:
        """Release the cluster, so that nothing is left that only an operator could remove.

        Args:
            stops_jobs: suspend all jobs, which save first, and delete the pods that are left after `timeout_s`. Else
                the preparation fails while a job has pods or a node is lent.

        Raises:
            UninstallationError: jobs or loans use the cluster, and `stops_jobs` is not set.
            ApiError: the API server refuses a call.
        """
        if stops_jobs:
            self._suspend_jobs()
            self._await_end_of_pods(timeout_s)
        else:
            self._require_unused()
        self._take_lease()
        try:
            if stops_jobs:
                self._delete_pods()
                self._delete_prefetches()
            else:
                self._require_unused()
            self._return_nodes()
            self._delete_loans()
            for kind, finalizer in _FINALIZERS:
                self._remove_finalizers(kind, finalizer)
        except BaseException:
            self._write_lease(holder="", duration_s=1)
            raise
        self._write_lease(holder=self._identity, duration_s=LEASE_KEPT_S)

    def find_use(self) -> ClusterUse:
        pods = tuple(f"{namespace_of(pod)}/{name_of(pod)}" for pod in self._list_pods())
        return ClusterUse(pods, tuple(name_of(node) for node in self._list_lent_nodes()))

    def _require_unused(self) -> None:
        if use := self.find_use():
            raise UninstallationError(
                f"Ebbtide still uses the cluster ({use}). Suspend or cancel the jobs and wait until the nodes are "
                "returned, or let the uninstallation stop them: `ebbtide prepare-uninstall --stop-jobs`, with Helm "
                "the value uninstall.stopJobs."
            )

    def _suspend_jobs(self) -> None:
        for job in self._list(ELASTIC_JOB):
            spec, status = get_mapping(job, "spec"), get_mapping(job, "status")
            if is_managed_by_us(job) and not has_ended_phase(status) and spec.get("suspend") is not True:
                logger.info("suspending ElasticJob %s/%s", namespace_of(job), name_of(job))
                self._cluster.patch(ELASTIC_JOB, name_of(job), namespace_of(job), change={"spec": {"suspend": True}})

    def _await_end_of_pods(self, timeout_s: float) -> None:
        """Wait until the operator has stopped all pods, at most `timeout_s`."""
        limit_s = self._monotonic_s() + timeout_s
        while (pods := self._list_pods()) and self._monotonic_s() < limit_s:
            logger.info("waiting for %d pods of jobs to save and end", len(pods))
            self._sleep(POLL_S)

    def _take_lease(self) -> None:
        """Take the Lease from the leader, and wait until it has noticed.

        A leader that cannot read the Lease any more stops by itself before the old Lease expires.
        """
        before = self._cluster.get_or_none(LEASE, OPERATOR_LEASE, self._lease_namespace)
        spec = get_mapping(before, "spec")
        self._write_lease(holder=self._identity, duration_s=LEASE_TAKEN_S)
        if spec.get("holderIdentity"):
            self._sleep(float(spec.get("leaseDurationSeconds") or LeaseTimings().lease_duration_s))

    def _write_lease(self, *, holder: str, duration_s: int) -> None:
        self._retry_conflicts(partial(self._try_write_lease, holder, duration_s))

    def _try_write_lease(self, holder: str, duration_s: int) -> None:
        lease = self._cluster.get_or_none(LEASE, OPERATOR_LEASE, self._lease_namespace)
        if lease is not None:
            spec = {**(lease.get("spec") or {}), "holderIdentity": holder, "leaseDurationSeconds": duration_s}
            self._cluster.replace(LEASE, {**lease, "spec": spec})

    def _delete_pods(self) -> None:
        for pod in self._list_pods():
            logger.warning("deleting pod %s/%s, which did not end in time", namespace_of(pod), name_of(pod))
            self._cluster.delete(POD, name_of(pod), namespace_of(pod), uid=uid_of(pod))

    def _delete_prefetches(self) -> None:
        """Delete the pods that load images or weights. Without permission to do so, they end at their deadlines."""
        selector = f"{PREFETCH_LABEL},{MANAGED_BY_LABEL}={SCHEDULER_NAME}"
        for pod in self._cluster.list(POD, label_selector=selector).items:
            self._cluster.delete(POD, name_of(pod), namespace_of(pod), uid=uid_of(pod))

    def _return_nodes(self) -> None:
        lent = [name_of(node) for node in self._list_lent_nodes()]
        self._restart_replicas(lent)
        for name in lent:
            self._retry_conflicts(partial(self._return_node, name))
            logger.info("node %s is returned", name)

    def _restart_replicas(self, nodes: Collection[str]) -> None:
        """Delete the standby replicas on lent nodes: they sleep, and no operator will wake them."""
        standbys = [standby for pool in self._list(POOL) if (standby := _find_standby(pool)) is not None]
        for pod in self._cluster.list(POD).items if standbys and nodes else ():
            namespace, labels = namespace_of(pod), labels_of(pod)
            is_replica = any(standby.matches(namespace, labels) for standby in standbys)
            if is_replica and get_mapping(pod, "spec").get("nodeName") in nodes:
                logger.info("deleting pod %s/%s, which sleeps, so that it starts again", namespace, name_of(pod))
                self._cluster.delete(POD, name_of(pod), namespace, uid=uid_of(pod))

    def _return_node(self, name: str) -> None:
        node = self._find(NODE, ("", name))
        if node is None:
            return
        taints = [taint for taint in node["spec"].get("taints") or () if taint.get("key") != LOANED_TAINT_KEY]
        metadata = {"labels": {LOAN_LABEL: None}, "annotations": {EPOCH_ANNOTATION: None}}
        change = {"metadata": metadata, "spec": {"taints": taints or None}}
        self._cluster.patch(NODE, name, change=change, resource_version=node["metadata"]["resourceVersion"])

    def _delete_loans(self) -> None:
        for loan in self._list(LOAN):
            self._cluster.delete(LOAN, name_of(loan), uid=uid_of(loan))

    def _remove_finalizers(self, kind: ResourceKind, finalizer: str) -> None:
        for item in self._list(kind):
            if finalizer in (item["metadata"].get("finalizers") or ()):
                self._retry_conflicts(partial(self._remove_finalizer, kind, key_of(item), finalizer))

    def _remove_finalizer(self, kind: ResourceKind, key: ObjectKey, finalizer: str) -> None:
        namespace, name = key
        item = self._find(kind, key)
        if item is None:
            return
        kept = [each for each in item["metadata"].get("finalizers") or () if each != finalizer]
        change = {"metadata": {"finalizers": kept or None}}
        self._cluster.patch(kind, name, namespace, change=change, resource_version=item["metadata"]["resourceVersion"])

    def _list_pods(self) -> list[Object]:
        pods = self._cluster.list(POD, label_selector=JOB_LABEL).items
        return [pod for pod in pods if pod.get("status", {}).get("phase") not in _END_PHASES]

    def _list_lent_nodes(self) -> list[Object]:
        return [node for node in self._cluster.list(NODE).items if _is_lent(node)]

    def _list(self, kind: ResourceKind) -> tuple[Object, ...]:
        """Return the objects of one of Ebbtide's kinds, none if its definition is not installed."""
        try:
            return self._cluster.list(kind).items
        except ApiError as error:
            if not error.is_not_found:
                raise
            return ()

    def _find(self, kind: ResourceKind, key: ObjectKey) -> Object | None:
        """Return the newest version of an object. The operator may list, but not get, cluster-scoped objects."""
        namespace, name = key
        found = self._cluster.list(kind, namespace=namespace, field_selector=f"metadata.name={name}").items
        return found[0] if found else None

    def _retry_conflicts(self, write: Callable[[], object]) -> None:
        """Call `write`, again if the object has changed since it was read."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                write()
            except ApiError as error:
                if not error.is_conflict or attempt == ATTEMPTS_MAX:
                    raise
                self._sleep(POLL_S)
            else:
                return


def _find_standby(pool: Object) -> Standby | None:
    """Return the standby of a Pool, or None without a valid one."""
    try:
        spec = parse_document(PoolSpec, pool.get("spec"))
        return None if spec.lending is None else standby_from_spec(spec.lending.standby)
    except InvalidDocumentError:
        return None


def _is_lent(node: Object) -> bool:
    """Return whether Ebbtide lent the node, by its label, or by its taint if someone removed the label."""
    is_tainted = any(taint.get("key") == LOANED_TAINT_KEY for taint in node["spec"].get("taints") or ())
    return LOAN_LABEL in labels_of(node) or (is_tainted and EPOCH_ANNOTATION in annotations_of(node))


def _format(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    return ", ".join(sorted(names)[:_LISTED_MAX]) + more
