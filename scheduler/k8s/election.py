"""Leader election by a Lease of coordination.k8s.io, the way client-go does it (tools/leaderelection).

Clocks of different machines are never compared. A candidate notes, by its own monotonic clock, when it last saw the
Lease change, and takes it once it stood still for the duration that its holder wrote into it. The holder counts from
the moment *before* it sent its last successful renewal and stops leading at a deadline that is shorter than the
duration, so that it has stopped before anybody else can begin."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.asking import Limits
from scheduler.k8s.client import Cluster
from scheduler.k8s.kinds import LEASE
from scheduler.k8s.objects import Object

JITTER = 0.2
LIMITS = Limits(rate_per_s=5.0, burst=10, connect_s=2.0, read_s=3.0, patience_s=0.0)
"""For the Cluster of an election: one of its own, so that a renewal never queues behind other writes, and without
repetitions, because `step` comes again anyway."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """A leader that falls silent is replaced after at most `lease_s` plus `retry_s` (and its jitter). It stops by
    itself `margin_s` before `renew_s`."""

    lease_s: int = 10
    renew_s: float = 7.0
    retry_s: float = 1.5
    margin_s: float = 0.5

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_s > self.margin_s + self.retry_s * (1 + JITTER):
            raise ValueError(f"terms need lease_s > renew_s > margin_s + {1 + JITTER} x retry_s, got {self}")


class Election:
    """`step` renews or tries to acquire; `run` calls it in time, in a thread of its own, because a tick may take
    longer than a lease lasts. `is_leading` is cheap and may be read from any thread."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        name: str,
        namespace: str,
        identity: str,
        terms: Terms | None = None,
        rng: Random | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.identity = identity
        self._cluster = cluster
        self._name = name
        self._namespace = namespace
        self._terms = terms or Terms()
        self._rng = rng or Random()
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._leading_until_s = float("-inf")
        self._released = False
        self._told = False
        self._stands_back_until_s = float("-inf")
        self._observed: Object | None = None
        self._observed_at_s = float("-inf")

    @property
    def is_leading(self) -> bool:
        return self._monotonic_s() < self._leading_until_s

    @property
    def holder(self) -> str:
        """Who held the Lease when it was last seen; empty if nobody."""
        return _holder(self._observed) if self._observed else ""

    def run(self, stop: threading.Event) -> None:
        """Until `stop`. Does not release: first whoever led has to come to rest, then call `release`."""
        while not stop.is_set():
            self.step()
            stop.wait(self._terms.retry_s * (1 + JITTER * self._rng.random()))

    def step(self) -> bool:
        """Renew, or acquire if it is free; returns `is_leading`. Never raises ApiError: who cannot reach the server
        keeps leading until the deadline, and no longer."""
        with self._lock:
            if not self._released and self._monotonic_s() >= self._stands_back_until_s:
                try:
                    self._try()
                except ApiError as error:
                    log.warning("the Lease %s/%s was not written: %s", self._namespace, self._name, error)
            self._tell()
            return self.is_leading

    def release(self) -> None:
        """Stop leading, for good, and free the Lease so that another candidate need not wait for its end."""
        with self._lock:
            self._released = True
            self._free()

    def stand_back(self, for_s: float) -> None:
        """Stop leading, and leave the Lease to others for this long: who leads could not do anything now."""
        with self._lock:
            self._stands_back_until_s = self._monotonic_s() + for_s
            if self.is_leading:
                log.info("%s stands back for %.0f s", self.identity, for_s)
                self._free()
            self._tell()

    def come_back(self) -> None:
        """Try for the Lease again with the next step."""
        with self._lock:
            self._stands_back_until_s = float("-inf")

    def _tell(self) -> None:
        """Log a change since the last time: a deadline passes without a step."""
        is_leading = self.is_leading
        if is_leading != self._told:
            log.info("%s %s", self.identity, "leads" if is_leading else "no longer leads")
        self._told = is_leading

    def _free(self) -> None:
        self._leading_until_s = float("-inf")
        try:
            lease = self._cluster.find(LEASE, self._name, self._namespace)
            if lease is not None and _holder(lease) == self.identity:
                self._cluster.replace(LEASE, self._written(lease, holder=""))
        except ApiError as error:
            log.warning("the Lease %s/%s was not released: %s", self._namespace, self._name, error)

    def _try(self) -> None:
        asked_at_s = self._monotonic_s()
        lease = self._cluster.find(LEASE, self._name, self._namespace)
        if lease is None:
            self._observe(self._cluster.create(LEASE, self._written(None, holder=self.identity)))
        else:
            self._observe(lease)
            if not self._may_take(lease):
                self._leading_until_s = float("-inf")
                return
            self._observe(self._cluster.replace(LEASE, self._written(lease, holder=self.identity)))
        self._leading_until_s = asked_at_s + self._terms.renew_s - self._terms.margin_s

    def _observe(self, lease: Object) -> None:
        if self._observed is None or _spec(self._observed) != _spec(lease):
            self._observed_at_s = self._monotonic_s()
        self._observed = lease

    def _may_take(self, lease: Object) -> bool:
        if _holder(lease) in ("", self.identity):
            return True
        lasts_s = _spec(lease).get("leaseDurationSeconds") or self._terms.lease_s
        return self._monotonic_s() >= self._observed_at_s + lasts_s

    def _written(self, lease: Object | None, *, holder: str) -> Object:
        """The Lease as we want it. Its times are for people: nobody computes with them."""
        now = datetime.fromtimestamp(self._wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = _spec(lease) if lease else {}
        spec = {
            **before,
            "holderIdentity": holder,
            "leaseDurationSeconds": self._terms.lease_s if holder else 1,
            "renewTime": now,
        }
        if lease is None or _holder(lease) != holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(before.get("leaseTransitions") or 0) + (1 if before and holder else 0)
        metadata = lease["metadata"] if lease else {"name": self._name, "namespace": self._namespace}
        return {"metadata": metadata, "spec": spec}


def _holder(lease: Object) -> str:
    return str(_spec(lease).get("holderIdentity") or "")


def _spec(lease: Object) -> Object:
    """Somebody may have made a Lease of this name without one."""
    spec: Object = lease.get("spec") or {}
    return spec
