"""Engines of inference that sleep on lent machines: the executor of machines, and engines over sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, ReportDemand, SubmitJob
from scheduler.domain.fleet import LoanState, Pool, PoolKind
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import DAY_S, LendingPolicy
from scheduler.domain.machine import Machine
from scheduler.domain.observation import NodeFacts
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import Standby, StandbyPhase
from scheduler.executors.agent_executor import AgentExecutor
from scheduler.executors.inference_placement import plan_engine_orders
from scheduler.executors.run_ledger import RunLedger
from scheduler.executors.standby_replicas import StandbyReplicas
from scheduler.forecast.forecaster import PoolForecaster
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.demand_forecasts import DemandForecaster
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.store.memory_store import MemoryStore
from tests.builders import a_fleet, a_job, a_loan, a_node, a_snapshot, a_spec
from tests.kubernetes.waiting import eventually
from tests.memory_run_log import MemoryRunLog
from tests.sleeping_engine import SleepingEngine, serving_engine

NODE = "localhost"
"""The name of a node is its host name, and the engine of this one answers on loopback."""
NOW_S = 1000.0


class World:
    """One machine of an inference pool, its engine, and the executor that observes it."""

    def __init__(self, engine: SleepingEngine) -> None:
        self.engine = engine
        self.machine = Machine(
            NODE, (NODE,), "inference", "cpu", "127.0.0.1", "0", 0.0, seen_at_s=NOW_S, digest="digest"
        )
        self.standby = Standby(url=f"http://{{node}}:{engine.port}", gpu_memory_bytes=2**30, timeout_s=1.0)
        self.now_s = NOW_S
        self.may_act = True
        self.executor = AgentExecutor(
            RunLedger(MemoryRunLog(), epoch=lambda: 1),
            self,
            now=lambda: self.now_s,
            disconnect_s=120.0,
            standby=StandbyReplicas(may_act=lambda: self.may_act, threads=2, recheck_s=0.05),
        )

    def list_machines(self) -> tuple[Machine, ...]:
        return (self.machine,)

    def observe(self, state: LoanState | None = None) -> NodeFacts:
        """Converge once, and return what is then observed of the node."""
        pools, _ = a_fleet(training=0, inference=0, lending=LendingPolicy(standby=self.standby, cold_start_s=300.0))
        loans = () if state is None else (a_loan(NODE, state),)
        self.executor.converge(a_snapshot((pools, {NODE: a_node(NODE, "inference")}), (), loans, now_s=self.now_s))
        return self.executor.observe().nodes[NODE]

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
        made.executor.close()


def test_engine_sleeps_before_the_loan_and_wakes_at_the_return(world: World) -> None:
    world.until(StandbyPhase.AWAKE)
    assert world.observe(LoanState.OFFERED).inference_gpus == 1, "it is not asleep yet"
    assert world.until(StandbyPhase.ASLEEP, LoanState.OFFERED).inference_gpus == 0
    assert world.engine.orders == ["POST /sleep?level=1"]
    world.observe(LoanState.RETURNED)
    world.now_s = NOW_S + 4.0
    facts = world.until(StandbyPhase.AWAKE, LoanState.RETURNED)
    assert world.engine.orders[1:] == ["POST /wake_up"]
    assert facts.standby is not None
    assert facts.standby.wake is not None
    assert facts.standby.wake.seconds <= 4.0
    assert world.executor.has_pending_changes()


@pytest.mark.parametrize(
    "fault",
    [{"lies": True}, {"order_s": 30.0}, {"status": 503}, {"status": 404}, {"redirect": "/"}, {"body": "x" * 100_000}],
    ids=str,
)
def test_engine_that_does_not_sleep_keeps_its_node(world: World, fault: dict[str, object]) -> None:
    for name, value in fault.items():
        setattr(world.engine, name, value)
    failed = world.until(StandbyPhase.SLEEP_FAILED, LoanState.OFFERED)
    assert failed.inference_gpus == 1


def test_engine_that_does_not_wake_counts_as_a_cold_start_and_is_tried_again(world: World) -> None:
    world.until(StandbyPhase.ASLEEP, LoanState.ACTIVE)
    world.engine.lies = True
    failed = world.until(StandbyPhase.WAKE_FAILED, LoanState.RETURNED)
    assert failed.standby is not None
    assert failed.standby.wake is not None
    assert failed.standby.wake.seconds >= 300.0
    world.engine.lies = False
    world.until(StandbyPhase.AWAKE, LoanState.RETURNED)


def test_process_that_does_not_lead_calls_no_engine(world: World) -> None:
    world.may_act = False
    for _ in range(5):
        world.observe(LoanState.OFFERED)
    world.executor.close()
    assert world.engine.requests == []


def test_engine_sleeps_until_no_job_holds_gpus_of_its_node() -> None:
    fleet = a_fleet(training=0, inference=2, lending=LendingPolicy(standby=Standby(url="http://{node}:8000")))
    job = a_job("a", state=JobState.RUNNING, on={"i0": (0,)})
    orders = plan_engine_orders(a_snapshot(fleet, [job]), down=["i1"])
    assert {name: order.asleep for name, order in orders.items()} == {"i0": True}
    assert [each.url for each in orders["i0"].replicas] == ["http://i0:8000"]


@pytest.mark.parametrize(
    "standby",
    [
        Standby("serving", {"app": "llm"}),
        Standby(url="http://gpu-1:8000"),
        Standby(url="http://{node}:8000", gpu_memory_bytes=2**50),
        Standby(url="http://{node}:8000", gpus=(0, 8)),
    ],
    ids=["pods", "one engine for two nodes", "more than the memory of a GPU", "GPU that does not exist"],
)
def test_standby_that_no_node_can_have_blocks_loans_with_its_reason(standby: Standby) -> None:
    site = a_snapshot(a_fleet(training=0, inference=2, lending=LendingPolicy(standby=standby)))
    orders = plan_engine_orders(site, down=())
    assert all(order.absence and not order.replicas for order in orders.values())
    facts = StandbyReplicas(threads=0)
    facts.follow(orders, NOW_S)
    assert {each.phase for each in facts.list_facts(NOW_S).values()} == {StandbyPhase.ABSENT}


def test_one_url_serves_a_pool_of_one_node() -> None:
    fleet = a_fleet(training=0, inference=1, lending=LendingPolicy(standby=Standby(url="https://gpu-1/engine/")))
    order = plan_engine_orders(a_snapshot(fleet), down=())["i0"]
    assert [each.url for each in order.replicas] == ["https://gpu-1/engine"]
    assert replace(order, absence="") == order


class Controller:
    """Ticks over the machine of a world, with a job that wants its GPUs."""

    def __init__(self, world: World) -> None:
        self.world, self.store, self.clock = world, MemoryStore(), ManualClock(NOW_S)
        self.policies = load_policy_set("ebbtide", PolicySettings(full_pass_period_s=1.0))
        self.forecaster = DemandForecaster(self.store, PoolForecaster, history_s=DAY_S, fits=ThreadPoolExecutor(1))
        self.sent = 0
        lease = self.store.acquire_lease("test", now_s=NOW_S, ttl_s=1e9)
        assert lease is not None
        self.epoch = lease.epoch
        rules = LendingPolicy(
            headroom=0.0, return_deadline_s=60.0, cold_start_s=0.0, demand_profile=(0.0,) * 24, standby=world.standby
        )
        self.send(CreatePool(Pool("inference", PoolKind.INFERENCE, rules)))
        self.send(AddNode(a_node(NODE, "inference")))
        self.send(ReportDemand("inference", 0.0))
        self.send(SubmitJob("a", a_spec(8)))

    def send(self, body: CommandBody) -> None:
        self.sent += 1
        assert self.store.send(Command(f"command-{self.sent}", self.clock.now_s(), body))

    def step(self) -> Snapshot:
        now_s = self.clock.now_s() + 1.0
        self.clock.move_to(now_s)
        self.world.now_s = now_s
        self.world.machine = replace(self.world.machine, seen_at_s=now_s)
        learned = self.forecaster.make_forecasts(self.store.load().snapshot, now_s)
        tick(self.store, self.world.executor, self.clock, self.policies, epoch=self.epoch, planning_inputs=learned)
        return self.store.load().snapshot

    def until(self, reached: Callable[[Snapshot], object], what: str) -> Snapshot:
        eventually(lambda: reached(self.step()), what=what, timeout_s=20.0)
        return self.store.load().snapshot


def test_job_gets_the_node_only_after_its_engine_sleeps_and_inference_only_after_it_wakes(world: World) -> None:
    """Ticks follow each other in a few milliseconds, so the engine answers after several of them."""
    world.engine.order_s = 0.2
    controller = Controller(world)
    offered = controller.until(lambda snapshot: snapshot.loans, "the node is offered")
    assert offered.loans[NODE].state is LoanState.OFFERED
    held = controller.until(lambda snapshot: snapshot.jobs["a"].allocation.target, "the job gets the node")
    assert held.loans[NODE].state is LoanState.ACTIVE
    assert world.engine.is_sleeping
    controller.send(ReportDemand("inference", 8.0))
    home = controller.until(lambda snapshot: not snapshot.loans, "the node is home")
    assert not home.jobs["a"].allocation.target
    awake = controller.until(is_awake, "the engine is awake")
    assert world.engine.orders == ["POST /sleep?level=1", "POST /wake_up"]
    assert len(awake.return_times["inference"].wake_times_s) == 1


def is_awake(snapshot: Snapshot) -> bool:
    standby = snapshot.nodes[NODE].standby
    return standby is not None and standby.phase is StandbyPhase.AWAKE
