"""WarmControl: takes requests from replicas in pods and gives them back, by a label that their Services select."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from scheduler.executors.engine_sleep import ReplicaError
from scheduler.executors.standby_replicas import StandbyOrder, StandbyReplica
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import POD, SERVICE, SERVING_LABEL, Object, labels_of, name_of, uid_of
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.pod_view import is_pod_ready
from scheduler.store.protocol import FencedError

POLL_S = 0.5
SERVICES_TTL_S = 5.0
"""Time for which the Services of a namespace are read once, so that many replicas can be drained at the same time."""

log = logging.getLogger(__name__)


class WarmControl:
    """Sets the label of replicas, and confirms that no Service selects an idle one and that a serving one is ready.

    While the API server gives no answer, nothing is known of a replica, so nothing is reported of it.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cluster = cluster
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._services: dict[str, tuple[float, Sequence[Object]]] = {}

    def bring(self, replica: StandbyReplica, order: StandbyOrder, *, is_wanted: Callable[[], bool]) -> bool:
        """Bring the replica to what is ordered, as `ReplicaControl` describes it."""
        until_s = self._monotonic_s() + order.standby.timeout_s
        try:
            if not self._set_traffic(replica, is_wanted, serves=not order.asleep):
                return False
            return order.asleep or self._await_ready(replica, until_s, is_wanted)
        except FencedError:
            return False
        except ApiError as error:
            if error.is_transient or error.is_ambiguous or error.is_conflict:
                return False
            hint = f". Add {replica.namespace} to rbac.warmStandbys of the chart" if error.is_forbidden else ""
            raise ReplicaError(f"its label {SERVING_LABEL} was not set: {error}{hint}") from None

    def _set_traffic(self, replica: StandbyReplica, is_wanted: Callable[[], bool], *, serves: bool) -> bool:
        """Set the label unless it is set. Return False if the pod is gone or the order was withdrawn."""
        pod, value = self._find_pod(replica), "true" if serves else "false"
        if pod is None or not is_wanted():
            return False
        if labels_of(pod).get(SERVING_LABEL) != value:
            if not serves:
                self._check_services(replica, {**labels_of(pod), SERVING_LABEL: value})
            change = {"metadata": {"uid": replica.uid, "labels": {SERVING_LABEL: value}}}
            self._cluster.patch(POD, replica.name, replica.namespace, change=change)
            log.info("%s on node %s gets %s", replica.title, replica.node, "requests" if serves else "no new requests")
        return True

    def _find_pod(self, replica: StandbyReplica) -> Object | None:
        pod = self._cluster.get_or_none(POD, replica.name, replica.namespace)
        return pod if pod is not None and uid_of(pod) == replica.uid else None

    def _check_services(self, replica: StandbyReplica, labels: Mapping[str, str]) -> None:
        """Check that no Service sends requests to a pod with these labels."""
        for service in self._list_services(replica.namespace):
            selector = service["spec"].get("selector") or {}
            if selector and all(labels.get(name) == value for name, value in selector.items()):
                name = f"{replica.namespace}/{name_of(service)}"
                hint = f'Add {SERVING_LABEL}: "true" to its selector'
                raise ReplicaError(f"Service {name} would still send requests to it. {hint}", is_final=True)

    def _list_services(self, namespace: str) -> Sequence[Object]:
        with self._lock:
            read_at_s, services = self._services.get(namespace, (float("-inf"), ()))
            if self._monotonic_s() - read_at_s >= SERVICES_TTL_S:
                services = self._cluster.list(SERVICE, namespace=namespace).items
                self._services[namespace] = self._monotonic_s(), services
        return services

    def _await_ready(self, replica: StandbyReplica, until_s: float, is_wanted: Callable[[], bool]) -> bool:
        while is_wanted() and (pod := self._find_pod(replica)) is not None:
            if is_pod_ready(pod.get("status") or {}):
                return True
            if self._monotonic_s() + POLL_S >= until_s:
                raise ReplicaError("it gets requests again, but its pod is not ready in time")
            self._sleep(POLL_S)
        return False
