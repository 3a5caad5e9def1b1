"""Seeded simulations with lost nodes, crashed workers, slow checkpoints, stale observations and lost commits.

Safety is checked at every tick. After the faults end, every job must finish and every recalled node must be returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from scheduler.domain.fleet import NodeState, PoolKind
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation
from scheduler.domain.recall_receipts import RecallOutcome
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import BreachKind
from scheduler.executors.executor import Executor
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import SimulatedRun
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Scenario, Simulation, TickRecord
from scheduler.simulator.fault_injection import FaultKind, FaultRates, SeededFaultInjector
from scheduler.simulator.simulate import build_scenario
from scheduler.simulator.throughput_curves import CurveCache
from tests.simulation.receipt_checks import check_receipts
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
SEEDS = range(1, 4)
MORE_SEEDS = range(4, 46)
POLICIES = load_policy_set("ebbtide", PolicySettings())
_ROUNDING_S = 1e-6


class Safety:
    """Wraps the simulated executor and records every problem that no fault excuses."""

    def __init__(self, world: SimulatedExecutor) -> None:
        self._world = world
        self.broken: list[str] = []
        self.killed: set[tuple[str, int]] = set()
        self.jobs_when_faults_end: int | None = None
        self.ticks = 0
        self.loans: set[str] = set()
        self.recalled: dict[str, float] = {}
        self.returns = 0

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
        """Not checked."""

    def on_tick(self, tick: TickRecord) -> None:
        self.ticks += 1
        now_s = tick.report.now_s
        if now_s >= FAULTS_UNTIL_S and self.jobs_when_faults_end is None:
            self.jobs_when_faults_end = len(tick.after.jobs)
        self.broken += [f"{now_s}: illegal {violation}" for violation in tick.report.violations]
        self.broken += [f"{now_s}: breach {breach}" for breach in tick.report.breaches if breach.kind in _NEVER_EXCUSED]
        self.loans.update(loan.id for loan in tick.after.loans.values())
        due = {loan.id: loan.return_by_s for loan in tick.after.loans.values() if loan.return_by_s is not None}
        self.returns += len(self.recalled.keys() - due.keys())
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
    """Yield workers on inference nodes that are not lent, or that are past their return deadline."""
    for run in seen.runs:
        for name in run.gpus:
            node, loan = desired.nodes[name], desired.loans.get(name)
            if desired.pools[node.pool].kind is PoolKind.TRAINING:
                continue
            if loan is None:
                yield f"{run.job_id} runs on {name}, which is not lent"
            elif loan.return_by_s is not None and desired.now_s > loan.return_by_s + _ROUNDING_S:
                yield f"{run.job_id} is still on {name}, due at {loan.return_by_s}"


class CheckedFaults(SeededFaultInjector):
    """Seeded faults, with the safety checks around the simulated executor."""

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


def simulate_seed(seed: int) -> str:
    """Simulate one seed with faults to its last job, check the end state, and return a summary."""
    whole = world(seed)
    submissions = [replace(submission, spec=replace(submission.spec, retries=1000)) for submission in whole.submissions]
    whole = replace(whole, submissions=tuple(submissions))
    faults = CheckedFaults(seed, tuple(node.name for node in whole.nodes), RATES)
    simulation = Simulation(whole, POLICIES, faults=faults)
    simulation.add_observer(faults.safety)
    last = simulation.run()
    safety = faults.safety
    injected = faults.count_faults()
    counts = ", ".join(f"{kind} {count}" for kind, count in injected.items())
    summary = (
        f"seed {seed}: {counts}; {len(safety.loans)} loans, {safety.returns} returns, "
        f"{len(safety.killed)} killed at their deadline, {safety.ticks} ticks"
    )
    print(summary)
    assert not safety.broken, safety.broken[:5]
    assert not last.jobs, f"jobs that did not end: {sorted(last.jobs)}"
    ended = simulation.memory_store.list_ended_jobs(limit=len(submissions) + 1)
    assert len(ended) == len(submissions)
    assert {job.state for job in ended} == {JobState.SUCCEEDED}
    assert all(loan.return_by_s is None for loan in last.loans.values()), "a recalled node was not returned"
    assert all(node.state is NodeState.UP for node in last.nodes.values())
    assert all(injected.values()), "every kind of fault must occur"
    assert safety.returns, "some node must be recalled and returned"
    assert safety.killed, "some checkpoint must be too slow"
    assert safety.jobs_when_faults_end, "some jobs must be left when the faults end"
    receipts = check_receipts(simulation.memory_store, last)
    assert RecallOutcome.IN_TIME in {receipt.outcome for receipt in receipts}
    return summary


def simulate_with_faults(seed: int, request: pytest.FixtureRequest) -> None:
    try:
        request.node.user_properties.append(("faults", simulate_seed(seed)))
    except AssertionError as error:
        raise AssertionError(f"{error}\nrepeat with: python -m pytest --full '{request.node.nodeid}'") from error


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_violate_no_invariant_and_every_job_ends(seed: int, request: pytest.FixtureRequest) -> None:
    simulate_with_faults(seed, request)


@pytest.mark.full
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_faults_with_more_seeds(seed: int, request: pytest.FixtureRequest) -> None:
    simulate_with_faults(seed, request)


def test_checks_find_workers_that_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(run: SimulatedRun, now_s: float, *, by_s: float, save_s: float) -> None:
        """Ignore the notice to leave."""

    monkeypatch.setattr(SimulatedRun, "leave", stay)
    with pytest.raises(AssertionError, match=r"is still on|breach"):
        simulate_seed(1)
