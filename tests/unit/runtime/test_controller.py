"""The control loop ticks when something is due, while it leads."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from scheduler.domain.commands import Command, PauseLending, ResumeLending, SetDemandSource
from scheduler.domain.demand_source import DemandQuery, PrometheusDemand
from scheduler.domain.events import EventCode
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.executors.executor import Executor as WorldExecutor
from scheduler.executors.executor import RecordingExecutor
from scheduler.forecast.forecaster import PoolForecaster
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.controller import Controller, ControllerConfig
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.demand_forecasts import DemandForecaster
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.solver.curve import compute_solver_fingerprint
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import FencedError, Lease, UnavailableError
from tests.builders import GPU, a_curve, a_fleet, a_job, a_snapshot


class Rig:
    def __init__(self, store: MemoryStore | None = None, *, holder: str = "one") -> None:
        self.store = store or MemoryStore(a_snapshot(a_fleet(training=1, inference=1)))
        self.clock = ManualClock(1000.0)
        self.executor = RecordingExecutor()
        self.reports: list[TickReport] = []
        self.rests = 0
        self.news = False
        self.elected = True
        self.pool: Executor = ThreadPoolExecutor(1)
        self.holder = holder
        self.controller = self.new_controller(self.executor)

    def new_controller(self, executor: WorldExecutor) -> Controller:
        return Controller(
            holder=self.holder,
            store=self.store,
            executor=executor,
            clock=self.clock,
            policies=load_policy_set("ebbtide"),
            curves=CurveBuilder(self.pool, in_flight_max=1),
            demand=DemandForecaster(self.store, PoolForecaster, history_s=1000.0, fits=ThreadPoolExecutor(1)),
            on_report=self.reports.append,
            on_leadership_lost=self.count_lost_leadership,
            has_changes=lambda: self.news,
            may_lead=lambda: self.elected,
            config=ControllerConfig(poll_s=0.001, tick_s_max=50.0, lease_s=9.0),
        )

    def count_lost_leadership(self) -> None:
        self.rests += 1

    def step(self, after_s: float = 0.0) -> TickReport | None:
        self.clock.move_to(self.clock.now_s() + after_s)
        return self.controller.step()


def test_loop_ticks_once_and_then_only_when_something_is_due() -> None:
    rig = Rig()
    assert rig.step() is not None
    assert rig.step(1.0) is None
    assert rig.step(49.0) is not None
    assert len(rig.reports) == 2


def test_loop_ticks_at_once_when_the_executor_has_changes() -> None:
    rig = Rig()
    rig.step()
    rig.news = True
    assert rig.step(0.1) is not None
    rig.news = False
    assert rig.step(0.1) is None


def test_one_tick_consumes_several_commands() -> None:
    rig = Rig()
    rig.step()
    for at in range(20):
        rig.store.send(Command(f"c{at}", 1000.0, PauseLending() if at % 2 else ResumeLending()))
    assert rig.step(0.1) is not None
    assert rig.step(0.1) is None
    assert rig.store.load().inbox == ()


def test_demand_of_a_pool_with_a_source_is_polled_and_reported() -> None:
    rig = Rig()
    rig.store.send(Command("source", 1000.0, SetDemandSource("inference", PrometheusDemand((DemandQuery("gpus"),)))))
    rig.step()
    rig.step(60.0)
    codes = [(event.code, event.subject) for report in rig.reports for event in report.events]
    assert codes == [(EventCode.POOL_CHANGED, "inference"), (EventCode.DEMAND_UNKNOWN, "inference")]
    assert rig.store.load().inbox == ()


def test_burst_of_commands_is_consumed_in_order_by_several_ticks() -> None:
    rig = Rig()
    rig.step()
    burst = [Command(f"c{at}", 1000.0, PauseLending() if at % 2 else ResumeLending()) for at in range(150)]
    for command in burst:
        rig.store.send(command)
    waiting = []
    while rig.step(0.1) is not None:
        waiting.append([command.id for command in rig.store.load().inbox])
    assert waiting == [[command.id for command in burst[taken:]] for taken in (64, 128, 150)]


def test_new_leader_first_converges_to_the_stored_state() -> None:
    rig = Rig()
    stored = rig.store.load().snapshot
    rig.step()
    assert rig.executor.converged_snapshots[0] is stored


def test_controller_without_the_lease_waits_until_it_is_free() -> None:
    first = Rig()
    first.step()
    second = Rig(first.store, holder="two")
    assert second.step() is None
    assert second.executor.converged_snapshots == []
    assert second.step(10.0) is not None


def test_fenced_leader_writes_nothing_and_may_lead_again() -> None:
    first = Rig()
    first.step()
    second = Rig(first.store, holder="two")
    second.step(10.0)
    generation = first.store.load().snapshot.generation
    first.store.send(Command("late", 1000.0, PauseLending()))
    assert first.step() is None
    assert first.store.load().snapshot.generation == generation
    assert len(first.store.load().inbox) == 1
    assert first.step(1.0) is None
    effects = len(first.executor.converged_snapshots)
    assert first.step(30.0) is not None
    assert len(first.executor.converged_snapshots) == effects + 2


class LaterWorld(RecordingExecutor):
    """Executor that knows a later epoch than the store."""

    def __init__(self, store: MemoryStore, *, epoch: int) -> None:
        super().__init__()
        self._store = store
        self._epoch = epoch

    def converge(self, desired: Snapshot) -> None:
        lease = self._store.get_lease()
        if lease is None or lease.epoch < self._epoch:
            raise FencedError("a later leader has written this")
        super().converge(desired)


def test_fenced_executor_makes_the_controller_acquire_later_epochs() -> None:
    """This happens after a restore of the database. With the old epoch, the controller could never act again."""
    rig = Rig()
    rig.controller = rig.new_controller(LaterWorld(rig.store, epoch=9))
    assert rig.step() is None
    for _ in range(8):
        rig.step(0.1)
    assert rig.controller.is_leader
    assert rig.controller.epoch >= 9


def test_controller_that_loses_the_election_releases_the_lease() -> None:
    first = Rig()
    first.step()
    second = Rig(first.store, holder="two")
    first.elected = False
    assert first.step(1.0) is None
    assert second.step(1.0) is not None
    first.elected, second.elected = True, False
    assert second.step(1.0) is None
    effects = len(first.executor.converged_snapshots)
    assert first.step(60.0) is not None
    assert len(first.executor.converged_snapshots) == effects + 2


def test_points_of_an_older_solver_are_dropped_and_solved_again() -> None:
    job = a_job("j", 4, model="tiny-gpt", global_batch=8)
    stale = a_curve({GpuShape.packed(GPU, 4, 8): 1.0})
    stored = a_snapshot(a_fleet(training=1, inference=0), [job], curves={job.spec.curve_key: stale}, solver="old")
    rig = Rig(MemoryStore(stored))
    report = rig.step()
    assert report is not None
    assert report.decisions == ()
    assert [wanted.shape.gpus for wanted in report.wanted_shapes] == [4]
    assert rig.store.load().snapshot.solver == compute_solver_fingerprint()
    rig.pool.shutdown(wait=True)
    rig.step(1.0)
    fresh = rig.store.load().snapshot
    assert fresh.jobs["j"].allocation.plan == fresh.curves[job.spec.curve_key].plans[GpuShape.packed(GPU, 4, 8)]


def test_close_releases_lease_pool_and_executor() -> None:
    rig, stop = Rig(), threading.Event()
    loop = threading.Thread(target=rig.controller.run, args=(stop,))
    loop.start()
    stop.set()
    loop.join(timeout=30.0)
    assert not loop.is_alive()
    other = rig.store.acquire_lease("two", now_s=rig.clock.now_s(), ttl_s=1.0)
    assert other is not None


def test_loaded_objects_are_exempt_from_garbage_collection_after_the_first_tick() -> None:
    rig, stop = Rig(), threading.Event()
    loop = threading.Thread(target=rig.controller.run, args=(stop,))
    loop.start()
    try:
        until_s = time.monotonic() + 30.0
        while not gc.get_freeze_count() and time.monotonic() < until_s:
            time.sleep(0.01)
        assert gc.get_freeze_count() > 0
    finally:
        stop.set()
        loop.join(timeout=30.0)
        gc.unfreeze()


class Failing(MemoryStore):
    """Store that is unavailable while `is_gone`."""

    is_gone = False

    def acquire_lease(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        self._answer()
        return super().acquire_lease(holder, now_s=now_s, ttl_s=ttl_s)

    def count_pending_commands(self) -> int:
        self._answer()
        return super().count_pending_commands()

    def release_lease(self, holder: str) -> None:
        self._answer()
        super().release_lease(holder)

    def _answer(self) -> None:
        if self.is_gone:
            raise UnavailableError("database is locked")


def test_controller_survives_an_outage_and_then_converges_to_the_stored_state() -> None:
    store = Failing(a_snapshot(a_fleet(training=1, inference=1)))
    rig = Rig(store)
    assert rig.step() is not None
    effects = len(rig.executor.converged_snapshots)
    store.is_gone = True
    with pytest.raises(UnavailableError):
        rig.step(1.0)
    assert rig.controller.epoch == 0
    rig.controller.close()
    store.is_gone = False
    rig.step(1.0)
    assert rig.controller.is_leader
    assert len(rig.executor.converged_snapshots) > effects


def test_loop_continues_during_an_outage() -> None:
    store = Failing(a_snapshot(a_fleet(training=1, inference=1)))
    store.is_gone = True
    rig, stop = Rig(store), threading.Event()
    loop = threading.Thread(target=rig.controller.run, args=(stop,))
    loop.start()
    store.is_gone = False
    while not rig.reports:
        assert loop.is_alive()
    stop.set()
    loop.join(timeout=30.0)
    assert not loop.is_alive()


def test_lost_leadership_is_reported_once() -> None:
    rig = Rig()
    rig.step()
    assert rig.rests == 0
    rig.elected = False
    rig.step(1.0)
    rig.step(1.0)
    assert rig.rests == 1
