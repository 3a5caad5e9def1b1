"""Apply an executor's observation to a snapshot's nodes, loans and jobs.

Everything here depends on values alone: equal snapshots and equal observations give equal results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduler.domain import gpu_sets
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import LoanState, Node, NodeState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_state import PLACED_STATES, JobState
from scheduler.domain.observation import FailureCause, NodeFacts, Observation, Run, RunPhase, StandbyFacts
from scheduler.domain.prefetch import PrefetchResult
from scheduler.domain.return_times import NO_RETURN_TIMES
from scheduler.domain.standby import advance_standby
from scheduler.scheduling.job_progress import record_frozen_layers
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.quarantine import record_incidents, record_straggler
from scheduler.scheduling.resize_fallback import fall_back
from scheduler.scheduling.run_measurements import (
    CHECKPOINT_DRIFT_S,
    record_first_step,
    record_measurements,
    record_shutdown_phases,
    with_usage,
)
from scheduler.scheduling.run_outcomes import (
    complete_job,
    replan_after_out_of_memory,
    requeue,
    requeue_refused,
    retry_or_fail,
    roll_back,
)

_ENDED_PHASES = (RunPhase.LEFT, RunPhase.LOST, RunPhase.FAILED)
_LIVE_PHASES = (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.LEAVING)


def mirror_nodes(snapshot: MutableSnapshot, observation: Observation) -> None:
    """Update the state and the use of each node. A loan whose node went down is lost."""
    for name, facts in observation.nodes.items():
        node = snapshot.nodes.get(name)
        if node is not None and not _matches_facts(node, facts):
            _mirror_node(snapshot, node, facts)
        if node is not None and (facts.standby is not None or node.standby is not None):
            _mirror_standby(snapshot, name, facts.standby)
        if node is not None and (facts.prefetches or node.prefetches):
            _mirror_prefetches(snapshot, name, facts.prefetches)
    _record_replica_starts(snapshot, observation)


def _mirror_standby(snapshot: MutableSnapshot, name: str, facts: StandbyFacts | None) -> None:
    """Record what the standby replicas of a node do, with an event when it changes."""
    node, now_s = snapshot.nodes[name], snapshot.now_s
    known = node.standby
    if facts is None:
        state = None
    else:
        state = known if facts.phase is None else advance_standby(known, facts.phase, facts.detail, now_s)
    if state is not known:
        snapshot.nodes[name] = replace(node, standby=state)
    if state is not None and known is not None and state.phase is not known.phase:
        detail = f": {state.detail}" if state.detail else ""
        message = f"the inference replicas on node {name} are {state.phase}{detail}"
        snapshot.record_event(EventCode.STANDBY_CHANGED, name, message, cause=state.phase.value)
    if facts is not None and facts.wake is not None:
        times = snapshot.return_times.get(node.pool, NO_RETURN_TIMES)
        if (updated := times.with_wake(facts.wake.ready_at_s, facts.wake.seconds)) is not times:
            snapshot.return_times[node.pool] = updated


def _mirror_prefetches(snapshot: MutableSnapshot, name: str, found: Sequence[PrefetchResult]) -> None:
    """Record the ended prefetches of a node, with one event each. They count as observed first."""
    node = snapshot.nodes[name]
    known = {result.id: result for result in node.prefetches}
    results = tuple(known.get(result.id, result) for result in found)
    if results != node.prefetches:
        snapshot.nodes[name] = replace(node, prefetches=results)
    for result in results:
        if result.id in known:
            continue
        numbers = {"seconds": result.seconds}
        loaded = f"prefetch for {result.purpose} on node {name}"
        if result.error:
            message = f"{loaded} failed after {result.seconds:.0f} s: {result.error}"
            snapshot.record_event(EventCode.PREFETCH_FAILED, name, message, numbers, cause=result.purpose.value)
        else:
            message = f"{loaded} took {result.seconds:.0f} s"
            snapshot.record_event(EventCode.NODE_PREFETCHED, name, message, numbers, cause=result.purpose.value)


def _record_replica_starts(snapshot: MutableSnapshot, observation: Observation) -> None:
    """Record how long inference replicas took to become ready, once each, in the order in which they did."""
    starts = [
        (facts.replica_start.ready_at_s, facts.replica_start.seconds, node.pool)
        for name, facts in observation.nodes.items()
        if facts.replica_start is not None and (node := snapshot.nodes.get(name)) is not None
    ]
    for ready_at_s, seconds, pool in sorted(starts):
        known = snapshot.return_times.get(pool, NO_RETURN_TIMES)
        if (updated := known.with_start(ready_at_s, seconds)) is not known:
            snapshot.return_times[pool] = updated


def _matches_facts(node: Node, facts: NodeFacts) -> bool:
    same_use = node.inference_gpus == facts.inference_gpus and node.other_gpus == facts.other_gpus
    same_use = same_use and (node.capacity is facts.capacity or node.capacity == facts.capacity)
    return same_use and (node.state is NodeState.UP) == facts.up


def _mirror_node(snapshot: MutableSnapshot, node: Node, facts: NodeFacts) -> None:
    state, name = NodeState.UP if facts.up else NodeState.DOWN, node.name
    snapshot.nodes[name] = replace(
        node,
        state=state,
        inference_gpus=facts.inference_gpus,
        other_gpus=facts.other_gpus,
        capacity=facts.capacity,
    )
    if state is not node.state:
        snapshot.record_event(EventCode.NODE_CHANGED, name, f"node {name} is {state}", cause=state.value)
    loan = snapshot.loans.get(name)
    if state is NodeState.DOWN and loan is not None and loan.is_in_effect:
        snapshot.put_loan(loan.transition_to(LoanState.LOST, snapshot.now_s))
        snapshot.record_event(EventCode.LOAN_LOST, name, f"node {name} went down while it was lent")


def mirror_pod_facts(snapshot: MutableSnapshot, observation: Observation) -> None:
    """Record the state of the volume claims of each job, and the API server's answer about its pods."""
    for job_id in observation.volumes.keys() | observation.reviews.keys():
        if (job := snapshot.jobs.get(job_id)) is None:
            continue
        volumes = observation.volumes.get(job_id, job.placement.volumes)
        review = observation.reviews.get(job_id, job.placement.review)
        if (job.placement.volumes, job.placement.review) != (volumes, review):
            snapshot.put_job(replace(job, placement=replace(job.placement, volumes=volumes, review=review)))


def mirror_runs(snapshot: MutableSnapshot, observation: Observation) -> None:
    """Update every job from its runs, in order of submission."""
    index = snapshot.original.index
    snapshot.measured_jobs |= {run.job_id for run in observation.runs if run.steps is not None}
    changed = _list_changed_jobs(snapshot, observation.runs) | index.releasing
    runs_by_job: defaultdict[str, list[Run]] = defaultdict(list)
    for run in observation.runs if changed else ():
        if run.job_id in changed:
            runs_by_job[run.job_id].append(run)
    jobs = [snapshot.jobs[job_id] for job_id in changed]
    for job in sorted(jobs, key=lambda job: (job.submitted_at_s, job.id)):
        _mirror_job(snapshot, job, runs_by_job.get(job.id, ()), observation)


def _list_changed_jobs(snapshot: MutableSnapshot, runs: Iterable[Run]) -> set[str]:
    """Return the ids of jobs whose runs differ from the job's record, and of running jobs without any run."""
    jobs, changed, seen = snapshot.jobs, set[str](), set[str]()
    for run in runs:
        job_id = run.job_id
        job = jobs.get(job_id)
        if job is not None and (job_id in seen or not _matches_run(job, run)):
            changed.add(job_id)
        seen.add(job_id)
    return changed | (snapshot.original.index.running - seen)


def _matches_run(job: Job, run: Run) -> bool:
    """Return whether the run is the job's current one and reports nothing that the job does not record already.

    A run that reports its steps is always processed: they are compared with an extrapolation over time.
    """
    if run.steps is not None or run.phase is not RunPhase.RUNNING or job.state is not JobState.RUNNING:
        return False
    if run.generation != job.allocation.generation:
        return False
    if run.checkpoint_steps is not None and run.checkpoint_steps > job.progress.checkpoint_steps:
        return False
    if run.frozen_layers is not None and run.frozen_layers > job.freezing.layers:
        return False
    if run.checkpoint_at_s is not None and run.checkpoint_at_s > job.progress.checkpoint_at_s + CHECKPOINT_DRIFT_S:
        return False
    if run.phases_s and run.generation > job.replan.generation:
        return False
    return with_usage(job.progress, run) is job.progress


def _mirror_job(snapshot: MutableSnapshot, job: Job, runs: Sequence[Run], observation: Observation) -> None:
    """Apply the newest ended run of an earlier generation, then the current run, then the GPUs that were released.

    A later generation is applied last, because its report of the finished steps is the newer one.
    """
    generation = job.allocation.generation
    current = [run for run in runs if run.generation == generation]
    older = sorted((run for run in runs if run.generation < generation), key=lambda run: run.generation)
    for run in [run for run in older if run.phase is RunPhase.SUCCEEDED] or older[-1:]:
        job = _mirror_old_run(snapshot, job, run)
    if not current and job.state is JobState.RUNNING and _is_fresh(observation, job):
        current = [Run(job.id, generation, RunPhase.LOST, reason="its workers disappeared without reporting an exit")]
    living = next((run for run in reversed(older) if run.phase in _LIVE_PHASES), None)
    for run in current:
        fallback = None
        if run.phase in (RunPhase.FAILED, RunPhase.LOST) and (living is not None or run.refusal is not None):
            fallback = fall_back(snapshot, job, run, living)
        job = fallback or _mirror_current_run(snapshot, job, run, is_replacing=living is not None)
    if job.allocation.releasing and _is_fresh(observation, job):
        _free_released_gpus(snapshot, job, runs)


def _is_fresh(observation: Observation, job: Job) -> bool:
    """Return whether a run of the job that the observation does not list is known to be gone."""
    return observation.converged_generation >= job.allocation.asked_at_generation


def _free_released_gpus(snapshot: MutableSnapshot, job: Job, runs: Sequence[Run]) -> None:
    """Free the releasing GPUs on which no run of an earlier generation is observed any more."""
    occupied: Gpus = {}
    for run in runs:
        if run.generation < job.allocation.generation:
            occupied = gpu_sets.union(occupied, run.gpus)
    releasing = gpu_sets.intersection(job.allocation.releasing, occupied)
    if releasing != job.allocation.releasing:
        _record_leave_times(snapshot, job, job.allocation.releasing.keys() - releasing.keys())
        settled = job.advance_to(snapshot.now_s)
        snapshot.put_job(replace(settled, allocation=replace(job.allocation, releasing=releasing)))


def _record_leave_times(snapshot: MutableSnapshot, job: Job, nodes: Iterable[str]) -> None:
    """Record how long after their recall a job has left these nodes. Nodes that are not recalled are left out."""
    for name in sorted(nodes):
        loan = snapshot.loans.get(name)
        if loan is not None and loan.state is LoanState.RECALLED and loan.recalled_at_s is not None:
            known = snapshot.return_times.get(loan.pool, NO_RETURN_TIMES)
            snapshot.return_times[loan.pool] = known.with_leave_time(job.id, snapshot.now_s - loan.recalled_at_s)


def _mirror_old_run(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Apply a run of an earlier generation: it may have succeeded instead of leaving, and it reports its checkpoint."""
    if job.is_ended or job.state is JobState.RUNNING:
        return job
    if run.phase is RunPhase.SUCCEEDED:
        return complete_job(snapshot, job, run)
    if run.phase in _ENDED_PHASES:
        return roll_back(snapshot, record_shutdown_phases(snapshot, job, run), run)
    return job


def _mirror_current_run(snapshot: MutableSnapshot, job: Job, run: Run, *, is_replacing: bool) -> Job:
    """Apply the current run. With `is_replacing`, workers of an earlier generation are alive: no work is lost yet."""
    if job.state not in PLACED_STATES:
        return job
    record_incidents(snapshot, job, run)
    match run.phase:
        case RunPhase.RUNNING:
            if job.state is not JobState.RUNNING:
                job = replace(job, placement=job.placement.with_start())
                job = _note_missing_session(snapshot, snapshot.transition_job(job, JobState.RUNNING), run)
            record_straggler(snapshot, job, run)
            job = record_first_step(snapshot, job, run) if run.phases_s else job
            job = record_frozen_layers(snapshot, record_measurements(snapshot, job, run), run.frozen_layers)
            return _set_checkpoint_target(snapshot, job, run)
        case RunPhase.STARTING if run.reason and job.message != run.reason and job.state is not JobState.RUNNING:
            job = replace(job, message=run.reason)
            snapshot.put_job(job)
        case RunPhase.SUCCEEDED:
            return complete_job(snapshot, record_first_step(snapshot, job, run), run)
        case RunPhase.FAILED | RunPhase.LOST if run.refusal is not None:
            job = job if is_replacing else roll_back(snapshot, job, run)
            return requeue_refused(snapshot, job, run.refusal, keeps_deadline=is_replacing)
        case RunPhase.FAILED if job.missing_secrets and job.state is not JobState.RUNNING:
            job = job if is_replacing else roll_back(snapshot, job, run)  # the agent did not get its secrets
            return requeue(snapshot, job, run.reason, counts_as_retry=False, keeps_deadline=is_replacing)
        case RunPhase.FAILED if run.cause is FailureCause.OUT_OF_MEMORY:
            return replan_after_out_of_memory(snapshot, roll_back(snapshot, job, run), run)
        case RunPhase.FAILED:
            return retry_or_fail(snapshot, roll_back(snapshot, job, run), run)
        case RunPhase.LOST | RunPhase.LEFT:
            message = run.reason or f"its workers are {run.phase}"
            job = job if is_replacing else roll_back(snapshot, job, run)
            return requeue(snapshot, job, message, counts_as_retry=False, keeps_deadline=is_replacing)
    return job


def _note_missing_session(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Record once that the script of a job that declares checkpoints has opened no session. It is not resized then."""
    if not run.lacks_session or job.has_reported or job.has_no_session:
        return job
    if job.resize_mode is not OnResize.CHECKPOINT or job.spec.checkpoint.path:
        return job
    job = replace(job, has_no_session=True)
    snapshot.put_job(job)
    snapshot.record_event(
        EventCode.JOB_HAS_NO_SESSION,
        job.id,
        "the job declares checkpoints, but its script has not opened a session of ebbtide: it is not resized before it "
        "does. Add ebbtide.elastic() or ebbtide.Session to the script, or set checkpoint.path to what it saves",
    )
    return job


def _set_checkpoint_target(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Set the steps that a requested checkpoint must cover: all that are finished when the request is first seen."""
    request = job.pending_checkpoint_request
    if request is not None and request.steps is None and run.steps is not None:
        job = replace(job, save_wish=replace(request, steps=max(1.0, run.steps)))
        snapshot.put_job(job)
    return job
