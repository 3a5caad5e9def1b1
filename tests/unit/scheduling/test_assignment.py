"""New mechanisms are composed in a policy set, without a change to `decide` or to a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.domain.decisions import ReasonCode, StartJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.cycle import SchedulingCycle, StageReport
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.stages.starting import misfit_reason, start_job
from tests.builders import a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=1, inference=0)


def started(result: TickResult) -> set[str]:
    return {decision.job_id for decision in result.decisions if isinstance(decision, StartJob)}


def test_policy_set_replaces_the_mechanism_that_assigns_gpus() -> None:
    """The mechanism starts one job per cycle, the narrowest one."""

    def start_narrowest(cycle: SchedulingCycle, evacuation: StageReport) -> Sequence[StageReport]:
        first, *others = sorted(cycle.view.jobs.values(), key=lambda job: job.spec.min_gpus)
        start_job(cycle, first, first.spec.min_gpus, first.spec.min_gpus)
        return (StageReport({job.id: misfit_reason(cycle, job, job.spec.min_gpus) for job in others}),)

    policies = replace(load_policy_set("fifo"), assign_gpus=start_narrowest)
    result = decide(a_snapshot(FLEET, [a_job("wide", 4), a_job("narrow", 1)]), policies)
    assert started(result) == {"narrow"}
    assert result.waiting.keys() == {"wide"}


def test_policy_set_chooses_which_jobs_block_the_queue() -> None:
    def block_at_priority(snapshot: Snapshot, job: Job, settings: PolicySettings) -> bool:
        return job.spec.priority > 0

    policies = replace(load_policy_set("fifo"), blocks_queue=block_at_priority)
    busy = a_job("busy", 1, state=JobState.RUNNING, on={"t0": (0,)})
    head, tail = a_job("head", 8), a_job("tail", 1, now_s=1.0)
    assert started(decide(a_snapshot(FLEET, [busy, head, tail], now_s=2.0), policies)) == {"tail"}
    urgent = replace(head, spec=replace(head.spec, priority=1))
    blocked = decide(a_snapshot(FLEET, [busy, urgent, tail], now_s=2.0), policies)
    assert started(blocked) == set()
    assert blocked.waiting["tail"].code is ReasonCode.BEHIND_HEAD_OF_QUEUE
