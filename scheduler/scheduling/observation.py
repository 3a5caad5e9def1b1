"""Apply an executor's observation to a snapshot's nodes, loans and jobs.

Everything here depends on values alone: equal snapshots and equal observations give equal results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from scheduler.domain import gpu_sets
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import LoanState, Node, NodeState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_account import OnResize, PermanentFault, RunFailure
from scheduler.domain.job_records import (
    OOM_ATTEMPTS_MAX,
    SHUTDOWN_PHASES,
    STARTUP_PHASES,
    MemoryRecord,
    OomFailure,
    Replan,
    ReplanPhase,
)
from scheduler.domain.job_state import PLACED_STATES, JobState
from scheduler.domain.observation import FailureCause, NodeFacts, Observation, Run, RunPhase
from scheduler.domain.placement_record import PodRefusal
from scheduler.plan_export.frameworks import FRAMEWORKS
from scheduler.scheduling.desired_state import release_gpus
from scheduler.scheduling.job_progress import record_frozen_layers, with_measured_steps
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.quarantine import record_incidents, record_straggler
from scheduler.scheduling.resize_fallback import fall_back

_ENDED_PHASES = (RunPhase.LEFT, RunPhase.LOST, RunPhase.FAILED)
_LIVE_PHASES = (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.LEAVING)
FAILED_AT_ONCE_S = 2.0
"""Two failures in a row with the same message are not retried if both runs were shorter than this."""
_CHECKPOINT_DRIFT_S = 1.0
"""Times of the same checkpoint in two reports differ by less than this."""
_DRIFT_SHARE = 0.05
"""Measured throughput and memory replace the known figures when they differ by more than this share."""


def mirror_nodes(snapshot: MutableSnapshot, observation: Observation) -> None:
    """Update the state and the use of each node. A loan whose node went down is lost."""
    for name, facts in observation.nodes.items():
        node = snapshot.nodes.get(name)
        if node is not None and not _matches_facts(node, facts):
            _mirror_node(snapshot, node, facts)


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
        snapshot.record_event(EventCode.NODE_CHANGED, name, f"node {name} is {state}")
    loan = snapshot.loans.get(name)
    if state is NodeState.DOWN and loan is not None and loan.is_live:
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
    if run.checkpoint_at_s is not None and run.checkpoint_at_s > job.progress.checkpoint_at_s + _CHECKPOINT_DRIFT_S:
        return False
    if run.phases_s and run.generation > job.replan.generation:
        return False
    return _with_usage(job.progress, run) is job.progress


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
        settled = job.advance_to(snapshot.now_s)
        snapshot.put_job(replace(settled, allocation=replace(job.allocation, releasing=releasing)))


def _mirror_old_run(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Apply a run of an earlier generation: it may have succeeded instead of leaving, and it reports its checkpoint."""
    if job.is_ended or job.state is JobState.RUNNING:
        return job
    if run.phase is RunPhase.SUCCEEDED:
        return _complete_job(snapshot, job, run)
    if run.phase in _ENDED_PHASES:
        return _roll_back(snapshot, _record_shutdown_phases(snapshot, job, run), run)
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
            job = _record_first_step(snapshot, job, run) if run.phases_s else job
            job = record_frozen_layers(snapshot, _record_measurements(snapshot, job, run), run.frozen_layers)
            return _set_checkpoint_target(snapshot, job, run)
        case RunPhase.STARTING if run.reason and job.message != run.reason and job.state is not JobState.RUNNING:
            job = replace(job, message=run.reason)
            snapshot.put_job(job)
        case RunPhase.SUCCEEDED:
            return _complete_job(snapshot, _record_first_step(snapshot, job, run), run)
        case RunPhase.FAILED | RunPhase.LOST if run.refusal is not None:
            job = job if is_replacing else _roll_back(snapshot, job, run)
            return _requeue_refused(snapshot, job, run.refusal, keeps_deadline=is_replacing)
        case RunPhase.FAILED if run.cause is FailureCause.OUT_OF_MEMORY:
            return _replan_after_out_of_memory(snapshot, _roll_back(snapshot, job, run), run)
        case RunPhase.FAILED:
            return _retry_or_fail(snapshot, _roll_back(snapshot, job, run), run)
        case RunPhase.LOST | RunPhase.LEFT:
            message = run.reason or f"its workers are {run.phase}"
            job = job if is_replacing else _roll_back(snapshot, job, run)
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


def _complete_job(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    now_s, generation = snapshot.now_s, snapshot.next_generation
    ended = release_gpus(job, JobState.SUCCEEDED, now_s, generation=generation, leave_by_s=now_s)
    steps = run.steps if run.steps is not None else float(job.spec.steps)
    progress = replace(_with_usage(ended.progress, run), steps=steps, loss=_latest_loss(ended, run))
    progress = replace(progress, is_reported=progress.is_reported or run.steps is not None)
    return snapshot.record_transition(job, replace(ended, progress=progress))


def _retry_or_fail(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Give up a failed run. The job fails if a retry cannot succeed, or if none is left."""
    reason, fault = _explain_missing_framework(job, run.reason or "its workers failed"), run.permanent_fault
    if fault is None and _repeats_last_failure(job, run, reason):
        fault = PermanentFault.REPEATED_FAILURE
    message = reason if fault is None else f"not retried ({fault}): {reason}"
    cause = fault or run.cause
    failed = _with_failure(snapshot, job, run, reason, code="" if cause is None else cause.value)
    if run.cause is FailureCause.HANG:
        snapshot.record_event(EventCode.JOB_HUNG, job.id, reason)
    return requeue(snapshot, failed, message, counts_as_retry=True, may_retry=fault is None)


def _explain_missing_framework(job: Job, reason: str) -> str:
    """Return the reason of a failed run. If it is a missing module of the job's framework, say so first."""
    framework = FRAMEWORKS.get(job.spec.framework)
    if framework is None or f"No module named '{framework.module.partition('.')[0]}" not in reason:
        return reason
    return (
        f"framework is {framework.name}, but {framework.title} is not installed where the command runs "
        f"(venv, setup or image): {reason}"
    )


def _with_failure(snapshot: MutableSnapshot, job: Job, run: Run, reason: str, *, code: str) -> Job:
    return replace(job, failure=RunFailure(snapshot.now_s, reason, code, run.ran_s))


def _repeats_last_failure(job: Job, run: Run, reason: str) -> bool:
    """Return whether this run and the one before it both failed at once, with the same message."""
    last = job.failure
    if last is None or last.reason != reason or last.ran_s is None or run.ran_s is None:
        return False
    return max(last.ran_s, run.ran_s) < FAILED_AT_ONCE_S


def requeue(
    snapshot: MutableSnapshot,
    job: Job,
    message: str,
    *,
    counts_as_retry: bool,
    may_retry: bool = True,
    keeps_deadline: bool = False,
) -> Job:
    """Give up the job's current run. A failure that counts as a retry fails the job when no retry is left.

    With `keeps_deadline`, workers of an earlier generation still have their time to save and exit.
    """
    failures = job.account.failures + (1 if counts_as_retry else 0)
    state = JobState.QUEUED if may_retry and failures <= job.spec.retries else JobState.FAILED
    now_s, generation, leave_by_s = snapshot.now_s, snapshot.next_generation, job.allocation.leave_by_s
    leave_by_s = leave_by_s if keeps_deadline and leave_by_s is not None else now_s
    requeued = release_gpus(job, state, now_s, generation=generation, leave_by_s=leave_by_s, message=message)
    return snapshot.record_transition(job, replace(requeued, account=replace(requeued.account, failures=failures)))


def _requeue_refused(snapshot: MutableSnapshot, job: Job, refusal: PodRefusal, *, keeps_deadline: bool) -> Job:
    """Give up a start that a node refused. The job backs off and avoids the node. Repeated refusals cost retries."""
    placement = job.placement.with_refusal(refusal, snapshot.now_s)
    job, costs_retry = replace(job, placement=placement), placement.costs_retry
    return requeue(snapshot, job, str(refusal), counts_as_retry=costs_retry, keeps_deadline=keeps_deadline)


def _roll_back(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Set the job back to the last checkpoint of a run that is gone, and count the work done since as lost.

    The run reached the steps that it reported, else those that its curve predicts. Lost GPU-seconds are the lost steps
    times the job's average cost of a step so far, work lost earlier excluded. A job that never reported loses all.
    """
    if run.phase is not RunPhase.FAILED and job.failure is not None and job.failure.ran_s is not None:
        job = replace(job, failure=replace(job.failure, ran_s=None))  # the next failure is not in a row with this one
        snapshot.put_job(job)
    recorded = _record_script_checkpoint(job, run)
    if recorded is not job:
        job = recorded
        snapshot.put_job(job)
    settled = job.advance_to(snapshot.now_s)
    is_reported = settled.has_reported or run.steps is not None
    kept = run.checkpoint_steps if run.checkpoint_steps is not None else settled.progress.checkpoint_steps
    reached = settled.progress.steps if run.steps is None else run.steps
    is_current = job.is_placed and run.generation == job.allocation.generation
    is_rolled_back = kept == job.progress.steps == job.progress.checkpoint_steps and job.state is not JobState.RUNNING
    if is_rolled_back and (is_reported or not is_current):
        return job
    lost_steps, account = max(0.0, reached - kept), settled.account
    lost_share = lost_steps / reached if reached else 0.0
    is_known = is_reported or kept or run.checkpoint_at_s is not None
    lost_gpu_s = (account.gpu_s - account.lost_gpu_s) * (lost_share if is_known else 1.0)
    progress = replace(settled.progress, steps=kept, checkpoint_steps=kept, checkpoint_at_s=snapshot.now_s)
    progress = replace(progress, is_reported=is_reported)
    account = replace(account, lost_gpu_s=account.lost_gpu_s + lost_gpu_s)
    rolled_back = replace(settled, progress=progress, account=account)
    snapshot.put_job(rolled_back)
    if lost_steps or (lost_gpu_s and not is_reported):
        _record_lost_work(snapshot, rolled_back, run, lost_steps=lost_steps, lost_gpu_s=lost_gpu_s)
    return rolled_back


def _record_script_checkpoint(job: Job, run: Run) -> Job:
    """Return the job with the steps that the last checkpoint of a script without a session covers, by its time."""
    at_s, progress = run.checkpoint_at_s, job.progress
    if at_s is None or run.steps is not None or at_s <= progress.checkpoint_at_s + _CHECKPOINT_DRIFT_S:
        return job
    steps = max(progress.checkpoint_steps, job.steps_at(at_s))
    return replace(job, progress=replace(progress, checkpoint_steps=steps, checkpoint_at_s=at_s))


def _record_lost_work(snapshot: MutableSnapshot, job: Job, run: Run, *, lost_steps: float, lost_gpu_s: float) -> None:
    """Record the event. Steps that were never reported are not named: only the GPU time is known."""
    kept, numbers = job.progress.checkpoint_steps, {"gpu_s": lost_gpu_s}
    if job.progress.is_reported:
        numbers["steps"] = lost_steps
        message = f"lost {lost_steps:.0f} steps since the last checkpoint"
    else:
        message = f"lost {lost_gpu_s / 3600.0:.2f} GPU-hours of work without reported progress"
    if not kept:
        message += "; a restart begins at step 0"
    message = f"{message}: {run.reason or run.phase}"
    numbers["restart_step"] = kept
    snapshot.record_event(EventCode.JOB_LOST_WORK, job.id, message, numbers, cause=(run.cause or run.phase).value)


def _record_measurements(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Record a new checkpoint at once, and measured progress once the extrapolation has drifted from it."""
    progress = _with_usage(_record_script_checkpoint(job, run).progress, run)
    if run.checkpoint_steps is not None and run.checkpoint_steps > progress.checkpoint_steps:
        progress = Progress(  # called for every checkpoint; `replace` would take three times as long
            progress.at_s,
            progress.steps,
            run.checkpoint_steps,
            snapshot.now_s,
            progress.correction,
            progress.loss,
            progress.corrections,
            progress.samples_per_s,
            progress.peak_bytes,
            progress.measured_gpu,
            progress.other_gpus,
            progress.is_reported,
        )
    if run.steps is not None:
        progress = with_measured_steps(job, progress, run.steps, snapshot.now_s, loss=run.loss)
    if progress is job.progress:
        return job
    measured = job.with_progress(progress)
    snapshot.put_job(measured)
    return measured


def _with_usage(progress: Progress, run: Run) -> Progress:
    """Return the progress with the run's throughput and memory, or the same object where neither has changed."""
    speed = progress.samples_per_s if run.samples_per_s is None else run.samples_per_s
    peak = progress.peak_bytes if run.peak_bytes is None else max(run.peak_bytes, progress.peak_bytes or 0)
    if not _has_changed(progress.samples_per_s, speed) and not _has_changed(progress.peak_bytes, peak):
        return progress
    return replace(progress, samples_per_s=speed, peak_bytes=peak)


def _has_changed(before: float | None, now: float | None) -> bool:
    return now is not None and (before is None or abs(now - before) > _DRIFT_SHARE * before)


def _latest_loss(job: Job, run: Run) -> float | None:
    return job.progress.loss if run.loss is None else run.loss


def _replan_after_out_of_memory(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Back off after an out-of-memory failure; after `OOM_ATTEMPTS_MAX` of them the job fails.

    The job waits in PLANNING until a plan is solved that fits with the corrected memory. No retry is used up. It also
    switches to the curve for all its frozen layers: with the new correction no curve is solved, so the old one has no
    advantage.
    """
    job = _with_failure(snapshot, job, run, run.reason or "out of memory", code=FailureCause.OUT_OF_MEMORY.value)
    memory = job.memory.with_failure(_build_oom_failure(snapshot, job, run), snapshot.now_s)
    state = JobState.FAILED if memory.is_exhausted else JobState.PLANNING
    now_s, generation = snapshot.now_s, snapshot.next_generation
    message = _describe_oom_failure(memory) if memory.is_exhausted else _describe_oom_retry(memory, now_s)
    message = f"{message}; {run.reason}" if run.reason else message
    released = release_gpus(job, state, now_s, generation=generation, leave_by_s=now_s, message=message)
    freezing = released.freezing.with_current_curve()
    return snapshot.record_transition(job, replace(released, memory=memory, freezing=freezing))


def _build_oom_failure(snapshot: MutableSnapshot, job: Job, run: Run) -> OomFailure:
    plan, target = job.allocation.plan, job.allocation.target
    assert plan is not None, "a run has a plan"
    measured = [peak for peak in (run.peak_bytes, job.progress.peak_bytes) if peak is not None]
    nodes = [snapshot.nodes[name] for name in target]
    tightest = min(nodes, key=lambda node: node.gpu_memory_bytes / max(1, plan.peak_bytes_on(node.gpu)))
    return OomFailure(
        plan=plan.summarize(),
        gpus=job.allocation.target_gpus,
        gpu_memory_bytes=tightest.gpu_memory_bytes,
        predicted_bytes=plan.peak_bytes_on(tightest.gpu),
        measured_bytes=max(measured, default=None),
    )


def _describe_oom_retry(memory: MemoryRecord, now_s: float) -> str:
    pause_s = (memory.retry_at_s or now_s) - now_s
    attempt = f"out of memory (attempt {len(memory.deaths)} of {OOM_ATTEMPTS_MAX}): {memory.deaths[-1]}"
    corrected = f"; new plans count {memory.factor:.2f} times the predicted memory" if memory.percent > 100 else ""
    return f"{attempt}{corrected}; retrying in {pause_s:.0f} s"


def _describe_oom_failure(memory: MemoryRecord) -> str:
    attempts = "; ".join(f"{number}. {failure}" for number, failure in enumerate(memory.deaths, 1))
    return f"out of memory in {len(memory.deaths)} attempts: {attempts}"


def _record_shutdown_phases(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Keep how long the workers of an ended generation took to leave, until the next generation runs."""
    left_s = {phase.value: run.phases_s[phase] for phase in SHUTDOWN_PHASES if phase in run.phases_s}
    if not left_s or run.generation < job.replan.generation or left_s == job.replan.left_s:
        return job
    job = replace(job, replan=Replan(job.replan.generation, left_s))
    snapshot.put_job(job)
    return job


def _record_first_step(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Record a generation's first step once, with an event if it ends a re-plan. A first start is not a re-plan."""
    if ReplanPhase.FIRST_STEP not in run.phases_s or run.generation <= job.replan.generation:
        return job
    if job.replan.left_s:
        _record_replan(snapshot, job, run)
    job = replace(job, replan=Replan(run.generation))
    snapshot.put_job(job)
    return job


def _record_replan(snapshot: MutableSnapshot, job: Job, run: Run) -> None:
    started_s = {phase.value: run.phases_s[phase] for phase in STARTUP_PHASES if phase in run.phases_s}
    phases_s = {**job.replan.left_s, **started_s}
    parts = ", ".join(f"{phase.replace('_', ' ')} {seconds:.1f} s" for phase, seconds in phases_s.items())
    message = f"re-plan took {sum(phases_s.values()):.1f} s: {parts}"
    numbers = {f"{phase}_s": seconds for phase, seconds in phases_s.items()}
    if run.traffic is not None:
        read_mb, moved_mb = run.traffic.read_bytes / 1e6, run.traffic.moved_bytes / 1e6
        message += f"; read {read_mb:.1f} MB, {moved_mb:.1f} MB of it written by other nodes"
        numbers |= {name: float(count) for name, count in asdict(run.traffic).items()}
    snapshot.record_event(EventCode.JOB_REPLANNED, job.id, message, numbers)
