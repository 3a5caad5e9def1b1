"""StandbyReplicas: carries out orders to sleep and to wake in threads of its own, and reports what replicas do.

The replicas state themselves whether they sleep, so a new leader reads the state of its predecessor's orders from them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from scheduler.domain.observation import ReplicaStart, StandbyFacts
from scheduler.domain.standby import StandbyPhase
from scheduler.kubernetes.engine_sleep import Engine, EngineClient, EngineError
from scheduler.kubernetes.pod_view import PodView
from scheduler.kubernetes.standby_orders import StandbyOrder

THREADS = 16
RECHECK_S = 30.0
"""Time after which a replica is asked again whether it does what was ordered."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of the newest order to a replica. An empty `problem` means that the replica confirmed it."""

    asleep: bool
    at_s: float
    problem: str = ""


class StandbyReplicas:
    """Orders by node, and the outcome by replica. `follow` and the readers are called by one thread and never block.

    Args:
        may_act: whether this process still leads. Without it, no replica is called.
    """

    def __init__(
        self,
        *,
        may_act: Callable[[], bool] = lambda: True,
        threads: int = THREADS,
        recheck_s: float = RECHECK_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._may_act = may_act
        self._recheck_s = recheck_s
        self._monotonic_s = monotonic_s
        self._stop = threading.Event()
        self._client = EngineClient(self._stop)
        self._lock = threading.Lock()
        self._orders: Mapping[str, StandbyOrder] = {}
        self._order_by_uid: dict[str, tuple[StandbyOrder, PodView]] = {}
        self._outcomes: dict[str, _Outcome] = {}
        self._in_flight: set[str] = set()
        self._waking_since_s: dict[str, float] = {}
        self._wakes: dict[str, ReplicaStart] = {}
        self._has_news = False
        self._queue: SimpleQueue[str] = SimpleQueue()
        self._thread_count = threads
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        """Stop the threads. They are daemons, so a call that hangs does not delay the end of the process."""
        self._stop.set()
        for _ in self._threads:
            self._queue.put("")

    def has_news(self) -> bool:
        """Return whether an outcome changed since the last call."""
        with self._lock:
            news, self._has_news = self._has_news, False
        return news

    def follow(self, orders: Mapping[str, StandbyOrder], now_s: float) -> None:
        """Carry out these orders and no others."""
        if orders and not self._threads:
            self._start_threads()
        replicas = {pod.uid: (order, pod) for order in orders.values() for pod in order.replicas if pod.address}
        with self._lock:
            self._orders, self._order_by_uid = orders, replicas
            for known in (self._outcomes, self._waking_since_s):
                for uid in known.keys() - replicas.keys():
                    del known[uid]
            self._wakes = {node: wake for node, wake in self._wakes.items() if node in orders}
            for uid, (order, _) in replicas.items():
                outcome = self._outcomes.get(uid)
                if outcome is not None and outcome.asleep and not outcome.problem and not order.asleep:
                    self._waking_since_s.setdefault(uid, now_s)
                if uid not in self._in_flight and self._is_due(outcome, order):
                    self._in_flight.add(uid)
                    self._queue.put(uid)

    def list_facts(self, now_s: float) -> dict[str, StandbyFacts]:
        """Return what the replicas on each node with an order do."""
        with self._lock:
            for node, order in self._orders.items():
                self._record_wakes(node, order, now_s)
            return {
                node: StandbyFacts(*self._find_phase(order), wake=self._wakes.get(node))
                for node, order in self._orders.items()
            }

    def list_failed(self) -> Iterator[PodView]:
        """Yield the replicas that must be replaced: they did not wake, or are awake on a node that is lent."""
        with self._lock:
            replicas = list(self._order_by_uid.items())
            outcomes = dict(self._outcomes)
        for uid, (order, pod) in replicas:
            outcome = outcomes.get(uid)
            is_failed = outcome is not None and outcome.asleep is order.asleep and bool(outcome.problem)
            if is_failed and not (order.asleep and order.is_offered):
                yield pod

    def _is_due(self, outcome: _Outcome | None, order: StandbyOrder) -> bool:
        if outcome is None or outcome.asleep is not order.asleep:
            return True
        return self._monotonic_s() - outcome.at_s >= self._recheck_s

    def _find_phase(self, order: StandbyOrder) -> tuple[StandbyPhase | None, str]:
        """Return the phase of the replicas and why they failed. None while their state is not known."""
        found = [self._outcomes.get(pod.uid) for pod in order.replicas]
        current = [each if each is not None and each.asleep is order.asleep else None for each in found]
        for pod, outcome in zip(order.replicas, current, strict=True):
            if outcome is not None and outcome.problem:
                phase = StandbyPhase.SLEEP_FAILED if order.asleep else StandbyPhase.WAKE_FAILED
                return phase, f"pod {pod.namespace}/{pod.name}: {outcome.problem}"
        if order.absence:
            return StandbyPhase.ABSENT, order.absence
        if not order.replicas or any(outcome is None for outcome in current):
            return None, ""
        if order.asleep:
            return StandbyPhase.ASLEEP, ""
        is_serving = not any(pod.uid in self._waking_since_s for pod in order.replicas)
        return (StandbyPhase.AWAKE if is_serving else None), ""

    def _record_wakes(self, node: str, order: StandbyOrder, now_s: float) -> None:
        """Record how long replicas took until they served. One that did not wake takes a cold start in addition."""
        for pod in order.replicas:
            since_s, outcome = self._waking_since_s.get(pod.uid), self._outcomes.get(pod.uid)
            if since_s is None or outcome is None or outcome.asleep is not order.asleep:
                continue
            if order.asleep:
                del self._waking_since_s[pod.uid]  # lent again before it served
            elif outcome.problem or pod.is_ready:
                del self._waking_since_s[pod.uid]
                late_s = order.cold_start_s if outcome.problem else 0.0
                self._wakes[node] = ReplicaStart(now_s, now_s - since_s + late_s)

    def _start_threads(self) -> None:
        self._threads = [
            threading.Thread(target=self._run, name=f"standby-{number}", daemon=True)
            for number in range(self._thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (uid := self._queue.get()) and not self._stop.is_set():
            self._carry_out(uid)

    def _carry_out(self, uid: str) -> None:
        """Bring a replica to what is ordered of it now, and record the outcome."""
        with self._lock:
            found = self._order_by_uid.get(uid)
        outcome = None
        try:
            if found is not None:
                outcome = self._bring(uid, *found)
        finally:
            with self._lock:
                self._in_flight.discard(uid)
                known = self._outcomes.get(uid)
                if outcome is not None and uid in self._order_by_uid:
                    self._outcomes[uid] = outcome
                    is_new = known is None or (known.asleep, known.problem) != (outcome.asleep, outcome.problem)
                    self._has_news = self._has_news or is_new

    def _bring(self, uid: str, order: StandbyOrder, pod: PodView) -> _Outcome | None:
        """Return the outcome, or None if the order was withdrawn meanwhile, or this process no longer leads."""

        def is_wanted() -> bool:
            with self._lock:
                current = self._order_by_uid.get(uid)
            return current is not None and current[0].asleep is order.asleep and self._may_act()

        standby = order.standby
        engine = Engine(pod.address, standby.port, standby.level, standby.timeout_s)
        wish, problem = "sleep" if order.asleep else "wake", ""
        try:
            if not self._client.bring(engine, asleep=order.asleep, is_wanted=is_wanted):
                return None
        except EngineError as error:
            problem = str(error)
            log.warning("pod %s/%s on node %s did not %s: %s", pod.namespace, pod.name, pod.node, wish, problem)
        except Exception:  # a thread that ends would leave its replica without orders
            problem = "an unexpected error, which the log of the operator shows"
            log.exception("pod %s/%s on node %s: %s", pod.namespace, pod.name, pod.node, wish)
        return _Outcome(order.asleep, self._monotonic_s(), problem)
