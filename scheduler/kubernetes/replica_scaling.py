"""ReplicaScaler: sets the replicas that are proposed for served models through the `/scale` subresource.

Ebbtide is the only writer of the replicas, or none: an object that a HorizontalPodAutoscaler or a KEDA ScaledObject
targets is left alone. Every write requires that the object has not changed since it was read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from scheduler.domain.serving import ScaleTarget, SizingMode
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import AUTOSCALER, SCALED_OBJECT, Object, ResourceKind, name_of
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.reflector import JOIN_TIMEOUT_S
from scheduler.kubernetes.resources.fleet import PoolResource
from scheduler.kubernetes.resources.meta import REPLICAS_SET, Condition, get_mapping
from scheduler.kubernetes.spec_commands import SpecCommands
from scheduler.store.protocol import FencedError

ROUND_S = 10.0
"""Interval at which the replicas of all targets are read again."""
READING_STALE_S = 1_800.0
"""Age from which a reading changes no replicas, unless the Pool sets `demand.staleAfter`."""

log = logging.getLogger(__name__)


class ScaleOutcome(StrEnum):
    """Result of an order, worst first. Reason of the condition of its Pool."""

    OTHER_AUTOSCALER = "OtherAutoscaler"
    TARGET_NOT_FOUND = "TargetNotFound"
    FORBIDDEN = "Forbidden"
    FAILED = "Failed"
    CONFLICT = "Conflict"
    NOT_READ_YET = "NotReadYet"
    NOT_PROPOSED = "NothingProposed"
    DRY_RUN = "DryRun"
    SCALED = "Scaled"


_GOOD = (ScaleOutcome.DRY_RUN, ScaleOutcome.SCALED)


@dataclass(frozen=True, slots=True)
class ScaleOrder:
    """The replicas that an object should have; None without a proposal. A dry order changes nothing."""

    model: str
    target: ScaleTarget
    replicas: int | None
    is_dry: bool


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """Result of an order. `message` is stable while nothing changes."""

    outcome: ScaleOutcome
    message: str


def list_scale_orders(pool: PoolResource, snapshot: Snapshot) -> tuple[ScaleOrder, ...]:
    """Return the orders for the models of a Pool that name a target. A stale reading proposes nothing."""
    reading = snapshot.demand.get(pool.pool.name)
    stale_s = pool.pool.lending.demand_stale_s or READING_STALE_S
    is_fresh = reading is not None and snapshot.now_s - reading.at_s <= stale_s
    proposed = {each.model: each.replicas for each in reading.advice} if reading is not None and is_fresh else {}
    sized = [each for each in pool.pool.serving if each.sizing.mode is not SizingMode.OFF]
    return tuple(
        ScaleOrder(each.model, each.sizing.target, proposed.get(each.model), each.sizing.mode is SizingMode.ADVISE)
        for each in sized
        if each.sizing.target is not None
    )


def build_scale_conditions(results: Iterable[tuple[ScaleOrder, ScaleResult]]) -> tuple[Condition, ...]:
    """Return the condition of a Pool from the results of its orders; none without orders."""
    results = sorted(results, key=lambda each: list(ScaleOutcome).index(each[1].outcome))
    if not results:
        return ()
    worst = results[0][1].outcome
    message = "; ".join(f"{order.model}: {result.message}" for order, result in results)
    return (Condition(REPLICAS_SET, worst in _GOOD, worst.value, message),)


def with_scaling(spec_commands: SpecCommands, conditions: Mapping[str, tuple[Condition, ...]]) -> SpecCommands:
    """Return the commands with the conditions by Pool uid added to theirs."""
    known = spec_commands.conditions
    added = {uid: (*known.get(uid, ()), *each) for uid, each in conditions.items()}
    return replace(spec_commands, conditions={**known, **added})


def carry_out(cluster: KubernetesClient, order: ScaleOrder) -> ScaleResult:
    """Bring the target of an order to its replicas, unless another autoscaler targets it.

    Raises:
        FencedError: this process no longer leads.
    """
    target, described = order.target, order.target.describe()
    try:
        if writer := _find_other_writer(cluster, target):
            message = f"{writer} targets {described}; delete it, or set sizing.mode to advise or off"
            return ScaleResult(ScaleOutcome.OTHER_AUTOSCALER, message)
        kind = _to_kind(target)
        scale = cluster.get(kind, target.name, target.namespace, subresource="scale")
        return _change_scale(cluster, order, kind, scale)
    except ApiError as error:
        return _describe_failure(error, order)


def _change_scale(cluster: KubernetesClient, order: ScaleOrder, kind: ResourceKind, scale: Object) -> ScaleResult:
    target, described = order.target, order.target.describe()
    current = int(get_mapping(scale, "spec").get("replicas", 0))
    if order.replicas is None:
        message = f"{described} has {current} replicas; there is no fresh reading of requests"
        return ScaleResult(ScaleOutcome.NOT_PROPOSED, message)
    done = ScaleOutcome.DRY_RUN if order.is_dry else ScaleOutcome.SCALED
    if current == order.replicas:
        return ScaleResult(done, f"{described} has the proposed {current} replicas")
    if order.is_dry:
        return ScaleResult(done, f"would change {described} from {current} to {order.replicas} replicas")
    version = str(scale["metadata"].get("resourceVersion", ""))
    change = {"spec": {"replicas": order.replicas}}
    cluster.patch(kind, target.name, target.namespace, change=change, resource_version=version, subresource="scale")
    log.info("changed %s from %d to %d replicas", described, current, order.replicas)
    return ScaleResult(done, f"{described} has the proposed {order.replicas} replicas")


def _describe_failure(error: ApiError, order: ScaleOrder) -> ScaleResult:
    described = order.target.describe()
    if error.is_not_found:
        message = f"{described} does not exist, or resource {order.target.resource} has no scale subresource"
        return ScaleResult(ScaleOutcome.TARGET_NOT_FOUND, message)
    if error.is_forbidden:
        message = f"the operator may not scale {described}; list its resource in the chart's value rbac.scale"
        return ScaleResult(ScaleOutcome.FORBIDDEN, message)
    if error.is_conflict:
        return ScaleResult(ScaleOutcome.CONFLICT, f"{described} was changed at the same time; it is read again")
    return ScaleResult(ScaleOutcome.FAILED, f"{described}: {error.reason}")


def _find_other_writer(cluster: KubernetesClient, target: ScaleTarget) -> str:
    """Return the autoscaler that targets the same object, or an empty string."""
    for kind in (AUTOSCALER, SCALED_OBJECT):
        try:
            found = cluster.list(kind, namespace=target.namespace).items
        except ApiError as error:
            if kind is SCALED_OBJECT and error.is_not_found:  # KEDA is not installed
                continue
            raise
        for item in found:
            if _targets(item, target):
                return f"{kind.name} {name_of(item)}"
    return ""


def _targets(autoscaler: Object, target: ScaleTarget) -> bool:
    """Return whether an autoscaler targets the object. The fields of a ScaledObject default to a Deployment."""
    reference = get_mapping(get_mapping(autoscaler, "spec"), "scaleTargetRef")
    group = str(reference.get("apiVersion") or "apps/v1").rpartition("/")[0]
    kind = reference.get("kind") or "Deployment"
    return (group, kind, reference.get("name")) == (target.api_version.rpartition("/")[0], target.kind, target.name)


def _to_kind(target: ScaleTarget) -> ResourceKind:
    group, _, version = target.api_version.rpartition("/")
    return ResourceKind(group, version, target.kind, target.resource)


class ReplicaScaler:
    """Carries out orders in its own thread, again every round. `follow` is called by one thread and never blocks.

    `on_change` is called by the thread after a round with another result.
    """

    def __init__(
        self, cluster: KubernetesClient, *, on_change: Callable[[], None] = lambda: None, round_s: float = ROUND_S
    ) -> None:
        self._cluster = cluster
        self._on_change = on_change
        self._round_s = round_s
        self._lock = threading.Lock()
        self._orders: frozenset[ScaleOrder] = frozenset()
        self._results: dict[ScaleOrder, ScaleResult] = {}
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica-scaling", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def follow(self, pools: Iterable[PoolResource], snapshot: Snapshot) -> dict[str, tuple[Condition, ...]]:
        """Carry out the orders of these Pools and no others. Return the conditions of the last results by Pool uid."""
        orders = {pool.uid: list_scale_orders(pool, snapshot) for pool in pools}
        with self._lock:
            wanted = frozenset(order for each in orders.values() for order in each)
            if wanted != self._orders:
                self._orders = wanted
                self._wake.set()
            results = dict(self._results)
        return {
            uid: build_scale_conditions((order, results.get(order) or _last_result(order, results)) for order in each)
            for uid, each in orders.items()
            if each
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                orders = self._orders
                self._wake.clear()
            try:
                results = {order: carry_out(self._cluster, order) for order in orders}
            except FencedError:
                results = {}  # a new leader follows its own orders
                with self._lock:
                    self._orders = frozenset()
            with self._lock:
                has_changes = results != self._results
                self._results = results
            if has_changes:
                self._on_change()
            self._wake.wait(self._round_s)


def _last_result(order: ScaleOrder, results: Mapping[ScaleOrder, ScaleResult]) -> ScaleResult:
    """Return the last result for the same object, so that a new number of replicas does not hide it for a moment."""
    for known, result in results.items():
        if (known.model, known.target, known.is_dry) == (order.model, order.target, order.is_dry):
            return result
    return ScaleResult(ScaleOutcome.NOT_READ_YET, f"{order.target.describe()} is being read")
