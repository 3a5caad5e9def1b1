"""Leader election with a Lease, following client-go's tools/leaderelection.

Clocks of different machines are never compared. A candidate takes the Lease once it has not changed, by the candidate's
own monotonic clock, for the duration in it. The holder counts from *before* it sent its last successful renewal, and
stops leading at a deadline shorter than the duration. So it has stopped before anyone else can start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import LEASE, Object
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.flow_control import ClientLimits

OPERATOR_LEASE = "ebbtide-operator"
"""Name of the Lease for which replicas of the operator compete."""
JITTER = 0.2
ELECTION_LIMITS = ClientLimits(qps=5.0, burst=10, connect_timeout_s=2.0, read_timeout_s=3.0, retry_timeout_s=0.0)
"""Limits for the election's own client. A separate client keeps renewals from queueing behind other writes; retries are
unnecessary because `try_acquire_or_renew` runs periodically.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    """Durations of the election.

    A silent leader is replaced within `lease_duration_s` plus `retry_period_s` and jitter.

    The leader stops `margin_s` before `renew_deadline_s`.
    """

    lease_duration_s: int = 10
    renew_deadline_s: float = 7.0
    retry_period_s: float = 1.5
    margin_s: float = 0.5

    def __post_init__(self) -> None:
        if not self.lease_duration_s > self.renew_deadline_s > self.margin_s + self.retry_period_s * (1 + JITTER):
            raise ValueError(
                f"{self} is invalid: lease_duration_s must be above renew_deadline_s, "
                f"which must be above margin_s + {1 + JITTER} x retry_period_s"
            )


class LeaderElector:
    """Candidate that holds or seeks the Lease.

    `run` needs a thread of its own, because a tick can take longer than the lease lasts.

    `is_leading` is cheap and can be read from any thread.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        *,
        name: str,
        namespace: str,
        identity: str,
        timings: LeaseTimings | None = None,
        rng: Random | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.identity = identity
        self._cluster = cluster
        self._name = name
        self._namespace = namespace
        self._timings = timings or LeaseTimings()
        self._rng = rng or Random()
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._leading_until_s = float("-inf")
        self._released = False
        self._was_leading = False
        self._paused_until_s = float("-inf")
        self._observed: Object | None = None
        self._observed_at_s = float("-inf")

    @property
    def is_leading(self) -> bool:
        return self._monotonic_s() < self._leading_until_s

    @property
    def holder(self) -> str:
        """The last observed holder of the Lease, empty without one."""
        return _holder_identity(self._observed) if self._observed else ""

    def run(self, stop: threading.Event) -> None:
        """Renew or acquire periodically until `stop`. Call `release` afterwards, when the leader's work has ended."""
        while not stop.is_set():
            self.try_acquire_or_renew()
            stop.wait(self._timings.retry_period_s * (1 + JITTER * self._rng.random()))

    def try_acquire_or_renew(self) -> bool:
        """Renew the Lease, or acquire it if it is free, and return `is_leading`.

        Never raises ApiError: an unreachable server ends leadership at the deadline, not before.
        """
        with self._lock:
            if not self._released and self._monotonic_s() >= self._paused_until_s:
                try:
                    self._acquire_or_renew()
                except ApiError as error:
                    log.warning("cannot update Lease %s/%s: %s", self._namespace, self._name, error)
            self._log_transition()
            return self.is_leading

    def release(self) -> None:
        """Stop leading permanently, and free the Lease for other candidates."""
        with self._lock:
            self._released = True
            self._release_lease()

    def step_down_for(self, duration_s: float) -> None:
        """Stop leading for `duration_s`, because this process cannot do the leader's work."""
        with self._lock:
            self._paused_until_s = self._monotonic_s() + duration_s
            if self.is_leading:
                log.info("%s steps down for %.0f s", self.identity, duration_s)
                self._release_lease()
            self._log_transition()

    def resume_candidacy(self) -> None:
        """Seek the Lease again from the next attempt on."""
        with self._lock:
            self._paused_until_s = float("-inf")

    def _log_transition(self) -> None:
        """Log a change of leadership since the last call. A deadline can pass between attempts."""
        is_leading = self.is_leading
        if is_leading != self._was_leading:
            log.info("%s %s", self.identity, "is the leader" if is_leading else "is no longer the leader")
        self._was_leading = is_leading

    def _release_lease(self) -> None:
        self._leading_until_s = float("-inf")
        try:
            lease = self._cluster.get_or_none(LEASE, self._name, self._namespace)
            if lease is not None and _holder_identity(lease) == self.identity:
                self._cluster.replace(LEASE, self._build_lease(lease, holder=""))
        except ApiError as error:
            log.warning("cannot release Lease %s/%s: %s", self._namespace, self._name, error)

    def _acquire_or_renew(self) -> None:
        sent_at_s = self._monotonic_s()
        lease = self._cluster.get_or_none(LEASE, self._name, self._namespace)
        if lease is None:
            self._record_observed(self._cluster.create(LEASE, self._build_lease(None, holder=self.identity)))
        else:
            self._record_observed(lease)
            if not self._can_acquire(lease):
                self._leading_until_s = float("-inf")
                return
            self._record_observed(self._cluster.replace(LEASE, self._build_lease(lease, holder=self.identity)))
        self._leading_until_s = sent_at_s + self._timings.renew_deadline_s - self._timings.margin_s

    def _record_observed(self, lease: Object) -> None:
        if self._observed is None or _lease_spec(self._observed) != _lease_spec(lease):
            self._observed_at_s = self._monotonic_s()
        self._observed = lease

    def _can_acquire(self, lease: Object) -> bool:
        if _holder_identity(lease) in ("", self.identity):
            return True
        duration_s = _lease_spec(lease).get("leaseDurationSeconds") or self._timings.lease_duration_s
        return self._monotonic_s() >= self._observed_at_s + duration_s

    def _build_lease(self, lease: Object | None, *, holder: str) -> Object:
        """Return the Lease to write. Its timestamps are informational only."""
        now = datetime.fromtimestamp(self._wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        previous = _lease_spec(lease) if lease else {}
        spec = {
            **previous,
            "holderIdentity": holder,
            "leaseDurationSeconds": self._timings.lease_duration_s if holder else 1,
            "renewTime": now,
        }
        if lease is None or _holder_identity(lease) != holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(previous.get("leaseTransitions") or 0) + (1 if previous and holder else 0)
        metadata = lease["metadata"] if lease else {"name": self._name, "namespace": self._namespace}
        return {"metadata": metadata, "spec": spec}


def _holder_identity(lease: Object) -> str:
    return str(_lease_spec(lease).get("holderIdentity") or "")


def _lease_spec(lease: Object) -> Object:
    """Return the spec, or an empty one: other clients can create a Lease without a spec."""
    spec: Object = lease.get("spec") or {}
    return spec
