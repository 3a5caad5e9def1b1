"""Laws of policy sets that allot: no more GPUs than there are, nobody moved for nothing, and every job gets through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.core.absorb import absorb
from scheduler.core.apply import apply
from scheduler.core.decide import decide
from scheduler.domain.decision import JobDecision, PreemptJob, StartJob, subject
from scheduler.domain.job_state import JobState
from scheduler.domain.reason import ReasonCode
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.policies.allotment import capacity_by_kind, wants_gpus
from scheduler.policies.policy_set import policy_set, policy_set_names
from scheduler.policies.settings import PolicySettings
from scheduler.simulator.curves import CurveBook
from scheduler.simulator.engine import Simulation
from scheduler.simulator.simulate import scenario
from scheduler.simulator.ticked import Ticked
from scheduler.simulator.traces import DemandChange
from tests.properties.worlds import a_world
from tests.simulation.synthetic import small_cluster, synthetic_demand, synthetic_jobs

SEEDS = st.integers(min_value=0, max_value=10**9)
WORLDS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ALLOTTING = [name for name in policy_set_names() if policy_set(name).allot is not None]


def absorbed(seed: int) -> Snapshot:
    world = a_world(seed)
    return absorb(world.snapshot, world.observation, ()).snapshot


@pytest.mark.parametrize("name", ALLOTTING)
@WORLDS
@given(seed=SEEDS)
def test_an_allotment_fits_and_has_a_reason_with_numbers_for_everybody_else(name: str, seed: int) -> None:
    snapshot = absorbed(seed)
    capacity, allot = capacity_by_kind(snapshot).total(), policy_set(name).allot
    assert allot is not None
    allotment = allot(snapshot, capacity, PolicySettings())
    assert sum(allotment.gpus.values()) <= capacity
    for job in filter(wants_gpus, snapshot.jobs.values()):
        count = allotment.gpus.get(job.id, 0)
        if count:
            assert job.spec.min_gpus <= count <= job.spec.max_gpus
        else:
            why = allotment.waiting[job.id]
            assert why.detail
            assert why.numbers or why.code is ReasonCode.WAITING_FOR_PLAN


@pytest.mark.parametrize("name", ALLOTTING)
@WORLDS
@given(seed=SEEDS)
def test_nobody_is_moved_twice_at_one_instant_or_makes_way_for_nobody(name: str, seed: int) -> None:
    snapshot = absorbed(seed)
    first = decide(snapshot, policy_set(name))
    after = replace(apply(snapshot, first.decisions), generation=8, full_pass_at_s=snapshot.now_s)
    again = decide(after, policy_set(name))
    decided = {subject(decision) for decision in first.decisions}
    assert not [d for d in again.decisions if isinstance(d, JobDecision) and d.job_id in decided]
    outranked = [d for d in first.decisions if isinstance(d, PreemptJob) and d.reason.code is ReasonCode.OUTRANKED]
    promised = [job_id for job_id, why in first.waiting.items() if why.code is ReasonCode.WAITING_FOR_RELEASE]
    leaving = [job for job in snapshot.jobs.values() if job.state is JobState.PREEMPTED]
    assert not outranked or promised or leaving or policy_set(name).scales


class Watchdog:
    """Fails on an illegal decision, and on a job that is started and stopped at one instant."""

    def __init__(self) -> None:
        self.started: dict[str, float] = {}
        self.outranked = 0

    def ticked(self, tick: Ticked) -> None:
        report: TickReport = tick.report
        assert report.violations == ()
        for decision in report.decisions:
            if isinstance(decision, StartJob):
                self.started[decision.job_id] = report.now_s
            elif isinstance(decision, PreemptJob):
                assert self.started[decision.job_id] < report.now_s
                self.outranked += decision.reason.code is ReasonCode.OUTRANKED

    def demand_changed(self, change: DemandChange) -> None:
        """Nothing to see."""


@pytest.mark.parametrize("reconfiguration_s", [0.0, 30.0])
@pytest.mark.parametrize("name", ALLOTTING)
def test_every_job_of_a_contended_trace_gets_through(name: str, reconfiguration_s: float) -> None:
    jobs = synthetic_jobs(11, 120, gap_s=200.0, mean_s=1800.0)
    cluster = small_cluster(training=3, inference=1).model_copy(
        update={"reconfiguration_s": {"default": reconfiguration_s}}
    )
    policies = policy_set(name, PolicySettings(reconfiguration_s=reconfiguration_s))
    curves, demand = CurveBook(), synthetic_demand(11, 1, peak_gpus=8)
    world = scenario(jobs, demand, cluster, policies, seed=11, curves=curves)
    watchdog = Watchdog()
    simulation = Simulation(world, policies, watchers=[watchdog], curves=curves)
    simulation.run()
    ended = simulation.memory.ended_jobs(limit=1000)
    assert sum(job.state is JobState.SUCCEEDED for job in ended) == len(jobs)
    assert policies.scales or watchdog.outranked > 5, "the trace has to be contended"
