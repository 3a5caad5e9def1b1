"""Orders to standby replicas, and what is observed of them, with engines over sockets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import NodeFacts, StandbyFacts
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import Standby, StandbyPhase, StandbyState
from scheduler.executors.standby_replicas import StandbyReplicas
from scheduler.kubernetes.api_objects import LOANED_TAINT
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.cluster_observation import observe_nodes
from scheduler.kubernetes.node_capacities import sum_foreign_requests
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_view import PodView, parse_pod_view
from scheduler.kubernetes.standby_orders import plan_standby_orders
from tests.builders import a_fleet, a_snapshot
from tests.kubernetes.waiting import eventually
from tests.sleeping_engine import SleepingEngine, serving_engine

LABELS = {"app": "llm"}
NOW_S = 1000.0


def a_standby(port: int = 8000, **changes: Any) -> Standby:
    return replace(Standby("serving", LABELS, port=port, timeout_s=1.0), **changes)


def a_replica(
    node: str = "i0", *, gpus: int = 0, address: str = "127.0.0.1", uid: str = "u1", **changes: Any
) -> PodView:
    pod = PodView("serving", f"llm-{uid}", uid, node, gpus, "Running", is_deleting=False)
    return replace(pod, address=address, is_ready=True, labels=LABELS, **changes)


def a_loan(state: LoanState) -> Loan:
    return Loan("i0-1", "i0", "inference", state, 0.0, 0.0)


def a_site(standby: Standby, *loans: Loan) -> Snapshot:
    fleet = a_fleet(training=0, inference=2, lending=LendingPolicy(standby=standby, cold_start_s=300.0))
    return a_snapshot(fleet, (), loans, now_s=NOW_S)


def a_view(*pods: PodView, lent: str = "") -> ClusterView:
    nodes = {name: NodeView(name, "1", is_ready=True, is_cordoned=False, gpus=8) for name in ("i0", "i1")}
    if lent:
        nodes["i0"] = replace(nodes["i0"], is_tainted=True, loan=lent, taints=(LOANED_TAINT,))
    foreign = tuple(pod for pod in pods if not pod.is_ours)
    return ClusterView(
        pods=tuple(pod for pod in pods if pod.gpus or pod.is_ours), nodes=nodes, standby_candidates=foreign
    )


def test_replicas_sleep_from_the_taint_until_the_last_pod_of_a_job_has_left() -> None:
    standby, replica = a_standby(), a_replica()
    ours = replace(a_replica(gpus=8, uid="job"), job_id="a")

    def is_asleep(view: ClusterView, *loans: Loan) -> bool:
        return plan_standby_orders(a_site(standby, *loans), view)["i0"].asleep

    assert not is_asleep(a_view(replica))
    assert not is_asleep(a_view(replica), a_loan(LoanState.OFFERED)), "inference pods can still be scheduled there"
    for state in (LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED):
        assert is_asleep(a_view(replica, lent="i0-1"), a_loan(state))
    assert is_asleep(a_view(replica, ours, lent="i0-1"), a_loan(LoanState.RETURNED))
    assert not is_asleep(a_view(replica, lent="i0-1"), a_loan(LoanState.RETURNED))


@pytest.mark.parametrize(
    ("pods", "is_absent"),
    [
        ((a_replica(),), False),
        ((), True),
        ((a_replica("i1"),), True),
        ((a_replica(gpus=8),), True),
        ((replace(a_replica(), namespace="other"),), True),
        ((replace(a_replica(), labels={"app": "web"}),), True),
        ((a_replica(address=""),), True),
        ((replace(a_replica(), is_deleting=True),), True),
    ],
)
def test_node_without_a_replica_that_can_sleep_says_so(pods: tuple[PodView, ...], is_absent: bool) -> None:
    order = plan_standby_orders(a_site(a_standby()), a_view(*pods))["i0"]
    assert bool(order.absence) is is_absent
    lent = plan_standby_orders(a_site(a_standby(), a_loan(LoanState.ACTIVE)), a_view(*pods, lent="i0-1"))["i0"]
    assert not lent.absence, "a replica that is replaced while the node is lent is no reason to end the loan"


def test_pools_without_standby_have_no_orders() -> None:
    assert plan_standby_orders(a_snapshot(a_fleet(training=1, inference=1), (), ()), a_view(a_replica())) == {}


def test_only_running_pods_of_others_have_an_address() -> None:
    status = {"phase": "Running", "podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]}
    found = parse_pod_view({"metadata": {"name": "a", "labels": LABELS}, "status": status})
    assert (found.address, found.is_ready, found.labels) == ("10.0.0.7", True, LABELS)
    assert not parse_pod_view({"metadata": {"name": "a"}, "status": {**status, "phase": "Pending"}}).address


def test_kept_host_memory_counts_beyond_requests() -> None:
    site = a_site(a_standby(host_memory_bytes=100))
    requests = sum_foreign_requests(site, a_view(a_replica(requests=(("memory", 30),))))
    assert dict(requests["i0"])["memory"] == 70, "the other 30 are in the requests of all pods"
    assert "i1" not in requests


class World:
    """One node, its replica's engine, and the replicas that follow orders about it."""

    def __init__(self, engine: SleepingEngine) -> None:
        self.engine = engine
        self.standby = a_standby(engine.port)
        self.replica = a_replica()
        self.may_act = True
        self.replicas = StandbyReplicas(may_act=lambda: self.may_act, threads=2, recheck_s=0.05)
        self.now_s = NOW_S
        self.state: StandbyState | None = None

    def observe(self, state: LoanState | None = None) -> NodeFacts:
        """Converge once, and return what is then observed of the node."""
        loans = () if state is None else (a_loan(state),)
        is_lent = state not in (None, LoanState.RETURNED)
        site = a_site(self.standby, *loans)
        view = a_view(self.replica, lent="i0-1" if is_lent else "")
        self.replicas.follow(plan_standby_orders(site, view), self.now_s)
        return observe_nodes(site, view, standby=self.replicas.list_facts(self.now_s))["i0"]

    def until(self, phase: StandbyPhase, state: LoanState | None = None) -> NodeFacts:
        def reach() -> NodeFacts | None:
            facts = self.observe(state)
            return facts if facts.standby is not None and facts.standby.phase is phase else None

        found = eventually(reach, what=f"phase {phase}", timeout_s=20.0)
        assert found is not None
        return found


@pytest.fixture
def world() -> Iterator[World]:
    with serving_engine() as engine:
        made = World(engine)
        yield made
        made.replicas.close()


def test_offered_node_is_in_use_until_its_replica_confirms_that_it_sleeps(world: World) -> None:
    assert world.until(StandbyPhase.AWAKE).inference_gpus == 8
    world.engine.lies = True
    assert world.observe(LoanState.OFFERED).inference_gpus == 1
    failed = world.until(StandbyPhase.SLEEP_FAILED, LoanState.OFFERED)
    assert failed.inference_gpus == 1
    assert list(world.replicas.list_failed()) == [], "a replica that serves is not replaced because it cannot sleep"
    world.engine.lies = False
    assert world.until(StandbyPhase.ASLEEP, LoanState.OFFERED).inference_gpus == 0
    assert world.engine.is_sleeping


def test_wake_is_measured_from_the_return_until_the_pod_is_ready(world: World) -> None:
    world.until(StandbyPhase.ASLEEP, LoanState.ACTIVE)
    world.replica = replace(world.replica, is_ready=False)
    assert world.observe(LoanState.RETURNED).inference_gpus == 0
    eventually(lambda: (world.observe(LoanState.RETURNED), not world.engine.is_sleeping)[1], what="awake")
    assert world.observe(LoanState.RETURNED).standby == StandbyFacts(None)
    world.now_s, world.replica = NOW_S + 4.0, replace(world.replica, is_ready=True)
    facts = world.until(StandbyPhase.AWAKE, LoanState.RETURNED)
    assert facts.inference_gpus == 8
    assert facts.standby is not None
    assert facts.standby.wake is not None
    assert (facts.standby.wake.ready_at_s, facts.standby.wake.seconds) == (NOW_S + 4.0, 4.0)


def test_replica_that_does_not_wake_is_replaced_and_counts_as_a_cold_start(world: World) -> None:
    world.until(StandbyPhase.ASLEEP, LoanState.ACTIVE)
    world.engine.lies = True
    failed = world.until(StandbyPhase.WAKE_FAILED, LoanState.RETURNED)
    assert [each.uid for each in world.replicas.list_failed()] == [world.replica.uid]
    assert failed.standby is not None
    assert failed.standby.wake is not None
    assert failed.standby.wake.seconds >= 300.0
    world.replica = replace(world.replica, uid="u2", address="")
    world.observe(LoanState.RETURNED)
    assert list(world.replicas.list_failed()) == []


def test_replica_that_restarts_on_a_lent_node_is_put_to_sleep_again_or_replaced(world: World) -> None:
    world.until(StandbyPhase.ASLEEP, LoanState.ACTIVE)
    world.engine.is_sleeping = False
    eventually(lambda: (world.observe(LoanState.ACTIVE), world.engine.is_sleeping)[1], what="asleep again")
    world.engine.is_sleeping, world.engine.lies = False, True
    world.until(StandbyPhase.SLEEP_FAILED, LoanState.ACTIVE)
    assert [each.uid for each in world.replicas.list_failed()] == [world.replica.uid]


def test_process_that_does_not_lead_calls_no_replica(world: World) -> None:
    world.may_act = False
    for _ in range(5):
        world.observe(LoanState.OFFERED)
    world.replicas.close()
    assert world.engine.requests == []


def test_withdrawn_offer_ends_the_attempt_and_the_replica_is_awake_again(world: World) -> None:
    world.standby = replace(world.standby, timeout_s=60.0)
    world.engine.lies = True
    world.observe(LoanState.OFFERED)
    eventually(lambda: world.engine.orders, what="the order was sent")
    assert world.until(StandbyPhase.AWAKE, LoanState.RETURNED).inference_gpus == 8


def test_replica_with_a_bad_address_fails_and_is_tried_again(world: World) -> None:
    world.replica = replace(world.replica, address="127.0.0.1\n")
    assert world.until(StandbyPhase.SLEEP_FAILED, LoanState.OFFERED).inference_gpus == 1
    world.replica = replace(world.replica, address="127.0.0.1")
    assert world.until(StandbyPhase.ASLEEP, LoanState.OFFERED).inference_gpus == 0


def test_nodes_that_are_down_have_no_orders() -> None:
    view = a_view(a_replica())
    nodes = {**view.nodes, "i0": replace(view.nodes["i0"], is_ready=False)}
    assert plan_standby_orders(a_site(a_standby()), replace(view, nodes=nodes)).keys() == {"i1"}


def test_orders_return_at_once_while_an_engine_hangs(world: World) -> None:
    world.engine.order_s = 30.0
    assert world.observe(LoanState.OFFERED).inference_gpus == 1
    assert world.until(StandbyPhase.SLEEP_FAILED, LoanState.OFFERED).standby is not None
