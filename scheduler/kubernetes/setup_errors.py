"""Reasons why the volumes or the network of a pod are not ready: the Events that kubelet and controllers record.

Pods have no such field. Kubelet names a missing Secret or ConfigMap, which Ebbtide may not read, only in an Event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from scheduler.kubernetes.api_actions import ApiAction
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import EVENT, Object
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.pod_changes import group_by_job
from scheduler.kubernetes.pod_view import PodView

logger = logging.getLogger(__name__)

FIRST_READ_S, REREAD_S = 3.0, 10.0
"""Time before the first read of a job's Events, since most pods are ready sooner, and between two reads."""
READS_MAX = 5
"""Jobs whose Events are read per tick, so that many waiting jobs do not overload the API server."""
_REASONS = ("FailedAttachVolume", "FailedCreatePodSandBox", "FailedMapVolume", "FailedMount")
_SUMMARY = "Unable to attach or mount volumes"
"""Start of kubelet's message after two minutes. It names volumes, and no reason."""


class SetupErrors:
    """Reader of the Events about bound pods that are not prepared. Thread-safe, in memory only.

    One pod of each job is read at a time, so that a large job costs no more requests than a small one.
    """

    def __init__(self, cluster: KubernetesClient, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._errors: dict[str, str] = {}
        self._due_s: dict[str, float] = {}
        self._read_at_s: dict[str, float] = {}

    def list_errors(self) -> Mapping[str, str]:
        """Return reason and message by uid of the pod, as far as they are known."""
        with self._lock:
            return dict(self._errors)

    def plan_reads(self, view: ClusterView) -> Iterator[ApiAction]:
        """Yield an action for each job whose pods have waited long enough for their volumes or their network.

        At most READS_MAX, those first that are due for the longest time.
        """
        now_s, waiting = self._monotonic_s(), group_by_job(pod for pod in view.pods if _awaits_setup(pod))
        with self._lock:
            uids = {pod.uid for pods in waiting.values() for pod in pods}
            self._errors = {uid: error for uid, error in self._errors.items() if uid in uids}
            self._read_at_s = {uid: at_s for uid, at_s in self._read_at_s.items() if uid in uids}
            self._due_s = {job_id: self._due_s.get(job_id, now_s + FIRST_READ_S) for job_id in waiting}
            read_at_s, due_s = dict(self._read_at_s), dict(self._due_s)
        due = sorted((at_s, job_id) for job_id, at_s in due_s.items() if now_s >= at_s)
        for _, job_id in due[:READS_MAX]:
            pod = min(waiting[job_id], key=lambda pod: (read_at_s.get(pod.uid, float("-inf")), pod.name))
            yield ApiAction(f"read the events of pod {pod.namespace}/{pod.name}", partial(self._read, pod))

    def _read(self, pod: PodView) -> None:
        error = ""
        try:
            error = find_setup_error(
                self._cluster.list(EVENT, namespace=pod.namespace, field_selector=f"regarding.uid={pod.uid}").items
            )
        except ApiError as failure:
            logger.warning("cannot read the events of pod %s/%s: %s", pod.namespace, pod.name, failure)
        with self._lock:
            self._read_at_s[pod.uid] = self._monotonic_s()
            self._due_s[pod.job_id] = self._monotonic_s() + REREAD_S
            if error:
                self._errors[pod.uid] = error


def find_setup_error(events: Iterable[Object]) -> str:
    """Return reason and message of the newest Event that says what is missing, or an empty string."""
    about = [event for event in events if event.get("reason") in _REASONS and event.get("note")]
    newest = max(about, key=lambda event: (not event["note"].startswith(_SUMMARY), _last_seen(event)), default=None)
    return "" if newest is None else f"{newest['reason']}: {newest['note']}"


def _awaits_setup(pod: PodView) -> bool:
    return pod.holds_gpus and not pod.is_prepared and not pod.is_deleting


def _last_seen(event: Object) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return next((str(time) for time in times if time), "")
