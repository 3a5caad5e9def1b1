"""Facts that explanations share are those that each job would find by looking at all jobs itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.queue_outlook import QueueOutlook
from tests.builders import GPU, a_fleet, a_job, a_loan, a_node, a_snapshot

MODELS = st.sampled_from(["", GPU, "h100"])


@st.composite
def queues(draw: st.DrawFn) -> tuple[Snapshot, dict[str, Reason]]:
    """Return jobs on nodes of two GPU models, lent or not, and pending jobs with reasons."""
    pools, nodes = a_fleet(training=2, inference=2)
    nodes = {**nodes, "t1": a_node("t1", "training", gpu="h100")}
    jobs, waiting = list[Job](), dict[str, Reason]()
    for at, name in enumerate(("t0", "t1", "i0", "i1", "t0")):
        if draw(st.booleans()):
            job = a_job(f"r{at}", 1, state=JobState.RUNNING, on={name: (at,)}, gpu=draw(MODELS))
            job = replace(job, spec=replace(job.spec, steps=draw(st.sampled_from([0, 50, 900]))))
            leaving = replace(job.allocation, releasing={name: (at,)}, target={}, leave_by_s=draw(st.floats(0.0, 99.0)))
            jobs.append(replace(job, allocation=leaving) if draw(st.booleans()) else job)
    for at in range(draw(st.integers(0, 5))):
        jobs.append(a_job(f"w{at}", draw(st.integers(1, 8)), gpu=draw(MODELS)))
        numbers = {"position": float(draw(st.integers(1, 4))), "needed_gpus": float(draw(st.integers(1, 8)))}
        if draw(st.booleans()):
            waiting[f"w{at}"] = Reason(ReasonCode.INSUFFICIENT_GPUS, "waits", draw(st.sampled_from([numbers, {}])))
    loans = [a_loan("i0", LoanState.ACTIVE)]
    return a_snapshot((pools, nodes), jobs, loans), waiting


def count_usable(snapshot: Snapshot, job: Job, gpus: Gpus) -> int:
    count = 0
    for name, indices in gpus.items():
        node = snapshot.nodes[name]
        is_allowed = job.accepts_lent_nodes or not snapshot.is_lent(node)
        if snapshot.serves_training(node) and job.spec.gpu in ("", node.gpu) and is_allowed:
            count += len(indices)
    return count


@given(queues())
def test_shared_facts_equal_those_of_each_job(queue: tuple[Snapshot, dict[str, Reason]]) -> None:
    snapshot, waiting = queue
    outlook = QueueOutlook(snapshot, waiting)
    for job in snapshot.jobs.values():
        others = [other for other in snapshot.jobs.values() if other.id != job.id]
        held = {other.id: count_usable(snapshot, job, other.allocation.held) for other in others}
        holders = outlook.list_holders(job)
        assert holders == {name: gpus for name, gpus in held.items() if gpus}
        assert list(holders) == sorted(holders, key=lambda name: (-holders[name], name))
        position = waiting[job.id].numbers.get("position", 0.0) if job.id in waiting else 0.0
        before = [
            int(reason.numbers["needed_gpus"])
            for name, reason in waiting.items()
            if reason.numbers.get("position", position) < position
            and ("" in (job.spec.gpu, snapshot.jobs[name].spec.gpu) or job.spec.gpu == snapshot.jobs[name].spec.gpu)
        ]
        assert outlook.count_gpus_needed_before(job) == sum(before)
        releases = list[tuple[float, int]]()
        for other in snapshot.jobs.values():
            left = other.allocation
            if left.leave_by_s is not None and left.releasing:
                releases.append((max(left.leave_by_s, snapshot.now_s), count_usable(snapshot, job, left.releasing)))
            steps = other.remaining_steps(snapshot.now_s)
            if other.state is JobState.RUNNING and steps is not None:
                end_s = snapshot.now_s + steps * other.step_time_s()
                releases.append((end_s, count_usable(snapshot, job, left.target)))
        assert [each for each in outlook.list_expected_releases(job) if each[1]] == sorted(
            each for each in releases if each[1]
        )
