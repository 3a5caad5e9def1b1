"""Invariants of policy sets that allot GPUs: capacity, no needless preemption, no starvation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scheduler.domain.decisions import JobDecision, PreemptJob, ReasonCode, StartJob, decision_subject
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policies.allotment import capacity_by_kind, wants_gpus
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from scheduler.scheduling.stages.assignment import AssignByAllotment
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.simulate import build_scenario
from scheduler.simulator.throughput_curves import CurveCache
from tests.properties.worlds import a_world
from tests.simulation.synthetic import small_cluster, synthetic_demand, synthetic_jobs

SEEDS = st.integers(min_value=0, max_value=10**9)
WORLDS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ALLOTMENTS = {
    name: mechanism.allot
    for name in list_policy_sets()
    if isinstance(mechanism := load_policy_set(name).assign_gpus, AssignByAllotment)
}


def updated_world(seed: int) -> Snapshot:
    world = a_world(seed)
    return update_snapshot(world.snapshot, world.observation, ()).snapshot


@pytest.mark.parametrize("name", ALLOTMENTS)
@WORLDS
@given(seed=SEEDS)
def test_allotment_fits_and_explains_every_other_job(name: str, seed: int) -> None:
    snapshot = updated_world(seed)
    capacity = capacity_by_kind(snapshot).total()
    allotment = ALLOTMENTS[name](snapshot, capacity, PolicySettings())
    assert sum(allotment.gpus.values()) <= capacity
    for job in filter(wants_gpus, snapshot.jobs.values()):
        count = allotment.gpus.get(job.id, 0)
        if count:
            assert job.spec.min_gpus <= count <= job.spec.max_gpus
        else:
            reason = allotment.waiting[job.id]
            assert reason.detail
            assert reason.numbers or reason.code is ReasonCode.WAITING_FOR_PLAN


@pytest.mark.parametrize("name", ALLOTMENTS)
@WORLDS
@given(seed=SEEDS)
@example(seed=544)  # a drained node's job outranks another one
@example(seed=1144)  # a cordoned node goes back
def test_no_job_changes_twice_at_once_or_is_preempted_for_nothing(name: str, seed: int) -> None:
    snapshot = updated_world(seed)
    first = decide(snapshot, load_policy_set(name))
    after = replace(apply_decisions(snapshot, first.decisions), generation=8, full_pass_at_s=snapshot.now_s)
    again = decide(after, load_policy_set(name))
    decided = {decision_subject(decision) for decision in first.decisions}
    assert not [d for d in again.decisions if isinstance(d, JobDecision) and d.job_id in decided]
    outranked = [d for d in first.decisions if isinstance(d, PreemptJob) and d.reason.code is ReasonCode.OUTRANKED]
    codes = [reason.code for reason in first.waiting.values()]
    promised = ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS in codes
    leaving = [job for job in snapshot.jobs.values() if job.state is JobState.PREEMPTED]
    moved = [d for d in first.decisions if isinstance(d, PreemptJob) and d not in outranked]  # they start again
    assert not outranked or promised or leaving or moved or load_policy_set(name).scales


class Watchdog:
    """Fails on an illegal decision, and on a job that is started and preempted at the same time."""

    def __init__(self) -> None:
        self.started: dict[str, float] = {}
        self.outranked = 0

    def on_tick(self, tick: TickRecord) -> None:
        report: TickReport = tick.report
        assert report.violations == ()
        for decision in report.decisions:
            if isinstance(decision, StartJob):
                self.started[decision.job_id] = report.now_s
            elif isinstance(decision, PreemptJob):
                assert self.started[decision.job_id] < report.now_s
                self.outranked += decision.reason.code is ReasonCode.OUTRANKED

    def on_demand_change(self, change: DemandChange) -> None:
        """Not checked."""


@pytest.mark.parametrize("reconfiguration_s", [0.0, 30.0])
@pytest.mark.parametrize("name", ALLOTMENTS)
def test_every_job_of_a_contended_trace_succeeds(name: str, reconfiguration_s: float) -> None:
    jobs = synthetic_jobs(11, 120, gap_s=200.0, mean_s=1800.0)
    cluster = small_cluster(training=3, inference=1).model_copy(
        update={"reconfiguration_s": {"default": reconfiguration_s}}
    )
    policies = load_policy_set(name, PolicySettings(reconfiguration_s=reconfiguration_s))
    curves, demand = CurveCache(), synthetic_demand(11, 1, peak_gpus=8)
    world = build_scenario(jobs, demand, cluster, policies, seed=11, curves=curves)
    watchdog = Watchdog()
    simulation = Simulation(world, policies, observers=[watchdog], curves=curves)
    simulation.run()
    ended = simulation.memory_store.list_ended_jobs(limit=1000)
    assert sum(job.state is JobState.SUCCEEDED for job in ended) == len(jobs)
    assert policies.scales or watchdog.outranked > 5, "the trace must be contended"
