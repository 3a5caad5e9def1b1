"""Seeded simulations in which nodes vanish, workers crash, saves drag, observations are old and commits get lost.

Safety is checked at every tick. Once the faults are over every job has to finish and every node to be home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from scheduler.domain.fleet import NodeState, PoolKind
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import BreachKind
from scheduler.executors.executor import Executor
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import SimulatedRun
from scheduler.scheduling.policies.policy_set import load_policy_set
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Scenario, Simulation, TickRecord
from scheduler.simulator.fault_injection import FaultKind, FaultRates, SeededFaultInjector
from scheduler.simulator.simulate import build_scenario
from scheduler.simulator.throughput_curves import CurveCache
from tests.simulation.synthetic import DAY_S, small_cluster, synthetic_demand, synthetic_jobs

FAULTS_UNTIL_S = 2.25 * DAY_S
RATES = FaultRates(
    until_s=FAULTS_UNTIL_S,
    mean_gap_s={
        FaultKind.NODE_LOSS: 10_000.0,
        FaultKind.WORKER_CRASH: 4_000.0,
        FaultKind.SLOW_CHECKPOINT: 1_500.0,
        FaultKind.STALE_OBSERVATION: 2_000.0,
        FaultKind.LOST_COMMIT: 2_500.0,
    },
)
SEEDS = range(1, 6)
MORE_SEEDS = range(6, 46)
POLICIES = load_policy_set("ebbtide", PolicySettings())
_ROUNDING_S = 1e-6


class Safety:
    """Stands between the control loop and the world, and between two ticks, and notes every broken promise that no
    fault excuses."""

    def __init__(self, world: SimulatedExecutor) -> None:
        self._world = world
        self.broken: list[str] = []
        self.killed: set[tuple[str, int]] = set()
        self.jobs_when_faults_end: int | None = None
        self.ticks = 0
        self.loans: set[str] = set()
        self.recalled: dict[str, float] = {}
        self.homecomings = 0

    def observe(self) -> Observation:
        seen = self._world.observe()
        self.broken += [f"{seen.at_s}: {problem}" for problem in (*_double_use(seen), *_two_generations(seen))]
        self.killed.update((run.job_id, run.generation) for run in seen.runs if "deadline" in run.reason)
        return seen

    def converge(self, desired: Snapshot) -> None:
        self._world.converge(desired)
        problems = (*_on_foreign_nodes(desired, self._world.peek()), *_held_twice(desired))
        self.broken += [f"{desired.now_s}: {problem}" for problem in problems]

    def close(self) -> None:
        self._world.close()

    def on_demand_change(self, change: DemandChange) -> None:
        """Nothing to check."""

    def on_tick(self, tick: TickRecord) -> None:
        self.ticks += 1
        now_s = tick.report.now_s
        if now_s >= FAULTS_UNTIL_S and self.jobs_when_faults_end is None:
            self.jobs_when_faults_end = len(tick.after.jobs)
        self.broken += [f"{now_s}: illegal {violation}" for violation in tick.report.violations]
        self.broken += [f"{now_s}: breach {breach}" for breach in tick.report.breaches if breach.kind in _NEVER_EXCUSED]
        self.loans.update(loan.id for loan in tick.after.loans.values())
        due = {loan.id: loan.return_by_s for loan in tick.after.loans.values() if loan.return_by_s is not None}
        self.homecomings += len(self.recalled.keys() - due.keys())
        self.recalled = due


_NEVER_EXCUSED = {BreachKind.GPU_HELD_TWICE, BreachKind.ON_UNLENT_NODE, BreachKind.RECALL_LATE}


def _double_use(seen: Observation) -> Iterator[str]:
    users: dict[tuple[str, int], str] = {}
    for run in seen.runs:
        for node, indices in run.gpus.items():
            for index in indices:
                other = users.setdefault((node, index), run.job_id)
                if other != run.job_id:
                    yield f"GPU {index} of {node} is used by {other} and {run.job_id}"


def _two_generations(seen: Observation) -> Iterator[str]:
    live = [run.job_id for run in seen.runs if run.gpus]
    for job_id in {job_id for job_id in live if live.count(job_id) > 1}:
        yield f"two generations of {job_id} run at once"


def _held_twice(desired: Snapshot) -> Iterator[str]:
    holders: dict[tuple[str, int], str] = {}
    for job in desired.jobs.values():
        for node, indices in job.allocation.held.items():
            for index in indices:
                other = holders.setdefault((node, index), job.id)
                if other != job.id:
                    yield f"GPU {index} of {node} is held by {other} and {job.id}"


def _on_foreign_nodes(desired: Snapshot, seen: Observation) -> Iterator[str]:
    """Workers on an inference node that is not on loan, or on one whose time is up."""
    for run in seen.runs:
        for name in run.gpus:
            node, loan = desired.nodes[name], desired.loans.get(name)
            if desired.pools[node.pool].kind is PoolKind.TRAINING:
                continue
            if loan is None:
                yield f"{run.job_id} runs on {name}, which is not lent"
            elif loan.return_by_s is not None and desired.now_s > loan.return_by_s + _ROUNDING_S:
                yield f"{run.job_id} is still on {name}, which was due at {loan.return_by_s}"


class CheckedFaults(SeededFaultInjector):
    """The same faults, with the safety checks between the world and what the control loop is shown of it."""

    safety: Safety

    def wrap_executor(self, executor: Executor) -> Executor:
        assert isinstance(executor, SimulatedExecutor)
        self.safety = Safety(executor)
        return super().wrap_executor(self.safety)


def world(seed: int) -> Scenario:
    jobs = synthetic_jobs(seed, 160, gap_s=1_400.0, mean_s=9_000.0)
    demand = synthetic_demand(seed, 2, peak_gpus=30.0)
    cluster = small_cluster(training=3, inference=5, checkpoint_interval_s=900)
    return build_scenario(jobs, demand, cluster, POLICIES, seed=seed, curves=CurveCache())


def endure(seed: int) -> str:
    """One seed from its first fault to its last job; says what struck."""
    whole = world(seed)
    generous = [replace(submission, spec=replace(submission.spec, retries=1000)) for submission in whole.submissions]
    whole = replace(whole, submissions=tuple(generous))
    faults = CheckedFaults(seed, tuple(node.name for node in whole.nodes), RATES)
    simulation = Simulation(whole, POLICIES, faults=faults)
    simulation.add_observer(faults.safety)
    last = simulation.run()
    safety = faults.safety
    struck = faults.count_faults()
    counts = ", ".join(f"{kind} {count}" for kind, count in struck.items())
    told = (
        f"seed {seed}: {counts}; {len(safety.loans)} loans, {safety.homecomings} homecomings, "
        f"{len(safety.killed)} killed at their deadline, {safety.ticks} ticks"
    )
    print(told)
    assert not safety.broken, safety.broken[:5]
    assert not last.jobs, f"jobs that never ended: {sorted(last.jobs)}"
    ended = simulation.memory_store.list_ended_jobs(limit=len(generous) + 1)
    assert len(ended) == len(generous)
    assert {job.state for job in ended} == {JobState.SUCCEEDED}
    assert all(loan.return_by_s is None for loan in last.loans.values()), "a recalled node is not home"
    assert all(node.state is NodeState.UP for node in last.nodes.values())
    assert all(struck.values()), "every kind of fault has to have struck"
    assert safety.homecomings, "nodes have to have been recalled"
    assert safety.killed, "some save has to have been too slow"
    assert safety.jobs_when_faults_end, "there has to be something left to do when the faults are over"
    return told


def told_how_to_repeat(seed: int, request: pytest.FixtureRequest) -> None:
    try:
        request.node.user_properties.append(("faults", endure(seed)))
    except AssertionError as broken:
        raise AssertionError(f"{broken}\nrepeat with: python -m pytest --full '{request.node.nodeid}'") from broken


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_break_no_promise_and_leave_nothing_behind(seed: int, request: pytest.FixtureRequest) -> None:
    told_how_to_repeat(seed, request)


@pytest.mark.full
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_faults_of_more_seeds(seed: int, request: pytest.FixtureRequest) -> None:
    told_how_to_repeat(seed, request)


def test_the_checks_notice_workers_that_will_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(run: SimulatedRun, now_s: float, *, by_s: float, save_s: float) -> None:
        """A planted fault: the order to leave is ignored."""

    monkeypatch.setattr(SimulatedRun, "leave", stay)
    with pytest.raises(AssertionError, match=r"is still on|breach"):
        endure(1)
