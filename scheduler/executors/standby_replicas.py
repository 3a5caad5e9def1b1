"""StandbyReplicas: carries out orders to idle and to serve in threads of its own, and reports what replicas do.

The replicas state themselves what they do, so a new leader reads the state of its predecessor's orders from them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from scheduler.domain.observation import ReplicaStart, StandbyFacts
from scheduler.domain.standby import Standby, StandbyMode, StandbyPhase
from scheduler.executors.engine_sleep import Engine, EngineClient, ReplicaError

THREADS = 16
RECHECK_S = 30.0
"""Time after which a replica is asked again whether it does what was ordered."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StandbyReplica:
    """A replica of inference on a node: a pod, or an engine on a machine.

    Args:
        uid: of the pod; the URL of an engine on a machine.
        title: names the replica in messages.
        url: base URL of its HTTP API, for replicas that sleep.
        is_running: whether it can be called.
        is_ready: whether its readiness probe succeeds. Engines on machines have none.
        namespace, name: of the pod; empty on machines.
    """

    uid: str
    node: str
    title: str
    url: str = ""
    is_running: bool = True
    is_ready: bool = True
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class StandbyOrder:
    """An order to the replicas on one node: to be idle, or to serve.

    Args:
        absence: why the node has no replica that can be idle; empty if it has.
        is_offered: whether the loan of the node only begins, so that a replica that fails to be idle may stay.
        cold_start_s: declared time until a replica that did not wake is replaced.
    """

    node: str
    standby: Standby
    asleep: bool
    replicas: tuple[StandbyReplica, ...] = ()
    absence: str = ""
    is_offered: bool = False
    cold_start_s: float = 0.0


class ReplicaControl(Protocol):
    """Brings replicas of one mode to what is ordered. Thread-safe."""

    def bring(self, replica: StandbyReplica, order: StandbyOrder, *, is_wanted: Callable[[], bool]) -> bool:
        """Bring the replica to what is ordered and confirm it. Does nothing if it is so already.

        Return False if `is_wanted` said meanwhile that the order does not count any more.

        Raises:
            ReplicaError: it did not get there within the timeout of the standby, or cannot.
        """


class SleepControl:
    """Puts engines to sleep and wakes them, over their HTTP API. `stop` ends the wait for an engine."""

    def __init__(self, stop: threading.Event) -> None:
        self._client = EngineClient(stop)

    def bring(self, replica: StandbyReplica, order: StandbyOrder, *, is_wanted: Callable[[], bool]) -> bool:
        """Bring the engine to what is ordered, as `ReplicaControl` describes it."""
        if not replica.url:
            raise ReplicaError("its address is no IP address", is_final=True)
        engine = Engine(replica.url, order.standby.level, order.standby.timeout_s)
        return self._client.bring(engine, asleep=order.asleep, is_wanted=is_wanted)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of the newest order to a replica. An empty `problem` means that the replica confirmed it.

    `since_s` is when the first of equal outcomes in a row came, and `at_s` when the last one did.
    """

    asleep: bool
    at_s: float
    since_s: float
    problem: str = ""


class StandbyReplicas:
    """Orders by node, and the outcome by replica. `follow` and the readers are called by one thread and never block.

    Args:
        warm: controls replicas of mode warm; None if there is none.
        may_act: whether this process still leads. Without it, no replica is called.
    """

    def __init__(
        self,
        *,
        warm: ReplicaControl | None = None,
        may_act: Callable[[], bool] = lambda: True,
        threads: int = THREADS,
        recheck_s: float = RECHECK_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._may_act = may_act
        self._recheck_s = recheck_s
        self._monotonic_s = monotonic_s
        self._stop = threading.Event()
        self._controls: dict[StandbyMode, ReplicaControl] = {StandbyMode.SLEEP: SleepControl(self._stop)}
        if warm is not None:
            self._controls[StandbyMode.WARM] = warm
        self._lock = threading.Lock()
        self._orders: Mapping[str, StandbyOrder] = {}
        self._order_by_uid: dict[str, tuple[StandbyOrder, StandbyReplica]] = {}
        self._outcomes: dict[str, _Outcome] = {}
        self._in_flight: set[str] = set()
        self._waking_since_s: dict[str, float] = {}
        self._wakes: dict[str, ReplicaStart] = {}
        self._has_news = False
        self._draining_until_s: dict[str, float] = {}
        self._queue: SimpleQueue[str] = SimpleQueue()
        self._thread_count = threads
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        """Stop the threads. They are daemons, so a call that hangs does not delay the end of the process."""
        self._stop.set()
        for _ in self._threads:
            self._queue.put("")

    def has_news(self) -> bool:
        """Return whether an outcome changed, or a replica has drained, since the last call."""
        now_s = self._monotonic_s()
        with self._lock:
            drained = [uid for uid, until_s in self._draining_until_s.items() if until_s <= now_s]
            for uid in drained:
                del self._draining_until_s[uid]
            news, self._has_news = self._has_news or bool(drained), False
        return news

    def follow(self, orders: Mapping[str, StandbyOrder], now_s: float) -> None:
        """Carry out these orders and no others."""
        if orders and not self._threads:
            self._start_threads()
        replicas = {each.uid: (order, each) for order in orders.values() for each in order.replicas if each.is_running}
        with self._lock:
            self._orders, self._order_by_uid = orders, replicas
            for known in (self._outcomes, self._waking_since_s, self._draining_until_s):
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

    def list_failed(self) -> Iterator[StandbyReplica]:
        """Yield the replicas that must be replaced: they did not wake, or do not sleep on a node that is lent.

        A warm replica that serves on a lent node only shares its processors, so it stays.
        """
        with self._lock:
            replicas = list(self._order_by_uid.items())
            outcomes = dict(self._outcomes)
        for uid, (order, replica) in replicas:
            outcome = outcomes.get(uid)
            is_failed = outcome is not None and outcome.asleep is order.asleep and bool(outcome.problem)
            may_stay = order.asleep and (order.is_offered or order.standby.mode is StandbyMode.WARM)
            if is_failed and not may_stay:
                yield replica

    def _is_due(self, outcome: _Outcome | None, order: StandbyOrder) -> bool:
        if outcome is None or outcome.asleep is not order.asleep:
            return True
        return self._monotonic_s() - outcome.at_s >= self._recheck_s

    def _find_phase(self, order: StandbyOrder) -> tuple[StandbyPhase | None, str]:
        """Return the phase of the replicas and why they failed. None while their state is not known."""
        found = [self._outcomes.get(replica.uid) for replica in order.replicas]
        current = [each if each is not None and each.asleep is order.asleep else None for each in found]
        for replica, outcome in zip(order.replicas, current, strict=True):
            if outcome is not None and outcome.problem:
                phase = StandbyPhase.SLEEP_FAILED if order.asleep else StandbyPhase.WAKE_FAILED
                return phase, f"{replica.title}: {outcome.problem}"
        if order.absence:
            return StandbyPhase.ABSENT, order.absence
        if not order.replicas or any(outcome is None for outcome in current):
            return None, ""
        if order.asleep:
            now_s, drain_s = self._monotonic_s(), _find_drain_s(order.standby)
            has_drained = all(outcome is not None and now_s - outcome.since_s >= drain_s for outcome in current)
            return (StandbyPhase.ASLEEP if has_drained else None), ""
        is_serving = not any(replica.uid in self._waking_since_s for replica in order.replicas)
        return (StandbyPhase.AWAKE if is_serving else None), ""

    def _record_wakes(self, node: str, order: StandbyOrder, now_s: float) -> None:
        """Record how long replicas took until they served. One that did not wake takes a cold start in addition."""
        for replica in order.replicas:
            since_s, outcome = self._waking_since_s.get(replica.uid), self._outcomes.get(replica.uid)
            if since_s is None or outcome is None or outcome.asleep is not order.asleep:
                continue
            if order.asleep:
                del self._waking_since_s[replica.uid]  # lent again before it served
            elif outcome.problem or replica.is_ready:
                del self._waking_since_s[replica.uid]
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
                if outcome is not None and uid in self._order_by_uid:
                    self._record(uid, outcome)

    def _record(self, uid: str, outcome: _Outcome) -> None:
        known = self._outcomes.get(uid)
        if known is not None and (known.asleep, known.problem) == (outcome.asleep, outcome.problem):
            self._outcomes[uid] = _Outcome(outcome.asleep, outcome.at_s, known.since_s, outcome.problem)
            return
        self._outcomes[uid], self._has_news = outcome, True
        self._draining_until_s.pop(uid, None)
        drain_s = _find_drain_s(self._order_by_uid[uid][0].standby)
        if outcome.asleep and not outcome.problem and drain_s:
            self._draining_until_s[uid] = outcome.since_s + drain_s

    def _bring(self, uid: str, order: StandbyOrder, replica: StandbyReplica) -> _Outcome | None:
        """Return the outcome, or None if the order was withdrawn meanwhile, or this process no longer leads."""

        def is_wanted() -> bool:
            with self._lock:
                current = self._order_by_uid.get(uid)
            return current is not None and current[0].asleep is order.asleep and self._may_act()

        wish, problem = "idle" if order.asleep else "serve", ""
        try:
            if not self._controls[order.standby.mode].bring(replica, order, is_wanted=is_wanted):
                return None
        except ReplicaError as error:
            problem = str(error)
            log.warning("%s on node %s does not %s: %s", replica.title, replica.node, wish, problem)
        except Exception:  # a thread that ends would leave its replica without orders
            problem = "an unexpected error, which the log of the controller shows"
            log.exception("%s on node %s: %s", replica.title, replica.node, wish)
        now_s = self._monotonic_s()
        return _Outcome(order.asleep, now_s, now_s, problem)


def _find_drain_s(standby: Standby) -> float:
    return standby.drain_s if standby.mode is StandbyMode.WARM else 0.0
