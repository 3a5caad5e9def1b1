"""What an executor saw, mirrored into jobs, nodes and loans.

A job that died of memory: what it needs is corrected, and it is planned anew after a pause, a few times at most.

How long each phase of a re-plan took, told once the next generation has made its first step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from scheduler.domain import gpu_sets
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import LoanState, Node, NodeState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job, Progress
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
from scheduler.scheduling.desired_state import release_gpus
from scheduler.scheduling.job_progress import record_frozen_layers
from scheduler.scheduling.mutable_snapshot import SnapshotBuilder

_ENDED_PHASES = (RunPhase.LEFT, RunPhase.LOST, RunPhase.FAILED)
_DRIFT_S = 5.0
"""Measured progress replaces the extrapolated one when they are this far apart: rarer writes, same truth."""
_DRIFT_SHARE = 0.05
"""Likewise measured speed and memory those that are known."""


def mirror_nodes(snapshot: SnapshotBuilder, observation: Observation) -> None:
    ledger, nodes = snapshot.original.index, snapshot.original.nodes
    if ledger.observed_nodes and ledger.observed_nodes[0] is observation.nodes and ledger.observed_nodes[1] is nodes:
        return
    for name, facts in observation.nodes.items():
        node = nodes.get(name)
        if node is not None and not _matches_facts(node, facts):
            _mirror_node(snapshot, node, facts)
    if not snapshot.nodes.changed_keys:
        ledger.observed_nodes = (observation.nodes, nodes)


def _matches_facts(node: Node, facts: NodeFacts) -> bool:
    same_use = node.inference_gpus == facts.inference_gpus and node.other_gpus == facts.other_gpus
    return same_use and (node.state is NodeState.UP) == facts.up


def _mirror_node(snapshot: SnapshotBuilder, node: Node, facts: NodeFacts) -> None:
    state, name = NodeState.UP if facts.up else NodeState.DOWN, node.name
    snapshot.nodes[name] = replace(node, state=state, inference_gpus=facts.inference_gpus, other_gpus=facts.other_gpus)
    if state is not node.state:
        snapshot.record_event(EventCode.NODE_CHANGED, name, f"{name} went {state}")
    loan = snapshot.loans.get(name)
    if state is NodeState.DOWN and loan is not None and loan.is_live:
        snapshot.loans[name] = loan.transition_to(LoanState.LOST, snapshot.now_s)
        snapshot.record_event(EventCode.LOAN_LOST, name, f"{name} went down while it was lent")


def mirror_runs(snapshot: SnapshotBuilder, observation: Observation) -> None:
    ledger = snapshot.original.index
    told, quiet = _select_changed_runs(snapshot, observation)
    jobs = snapshot.jobs
    affected = {job_id for job_id in told if job_id in jobs} | ledger.releasing
    running = sum(job_id in ledger.running for job_id in told)
    if quiet + running < len(ledger.running):  # some job that should run shows no run at all
        seen = {run.job_id for run in observation.runs}
        affected |= ledger.running - seen
    for job in sorted((jobs[job_id] for job_id in affected), key=lambda job: (job.submitted_at_s, job.id)):
        runs = told.get(job.id, ())
        _mirror_job(snapshot, job, runs, observation)
        if len(runs) == 1 and jobs[job.id] is job and _runs_as_desired(job, runs[0]):
            ledger.observed_runs[job.id] = runs[0]


def _runs_as_desired(job: Job, run: Run) -> bool:
    """A run that does what it should and tells nothing by itself."""
    allocation = job.allocation
    settled = job.state is JobState.RUNNING and not allocation.releasing
    return settled and run.steps is None and run.gpus is allocation.target


def _select_changed_runs(
    snapshot: SnapshotBuilder, observation: Observation
) -> tuple[Mapping[str, Sequence[Run]], int]:
    """All runs of the jobs that may have something new, and how many other running jobs show a run."""
    heard, runs = snapshot.original.index.observed_runs, observation.runs
    news = {run.job_id for run in runs if heard.get(run.job_id) is not run} | snapshot.original.index.releasing
    listed = [run for run in runs if run.job_id in news] if news else []
    told: defaultdict[str, list[Run]] = defaultdict(list)
    for run in listed:
        told[run.job_id].append(run)
    return told, len(runs) - len(listed)


def _mirror_job(snapshot: SnapshotBuilder, job: Job, runs: Sequence[Run], observation: Observation) -> None:
    """A later generation's word on where the work stands counts more than an earlier one's."""
    generation = job.allocation.generation
    current = [run for run in runs if run.generation == generation]
    older = sorted((run for run in runs if run.generation < generation), key=lambda run: run.generation)
    for run in [run for run in older if run.phase is RunPhase.SUCCEEDED] or older[-1:]:
        job = _mirror_old_run(snapshot, job, run)
    if not current and job.state is JobState.RUNNING and _is_fresh(observation, job):
        current = [Run(job.id, generation, RunPhase.LOST, reason="its workers are gone without a word")]
    for run in current:
        job = _mirror_current_run(snapshot, job, run)
    if job.allocation.releasing and _is_fresh(observation, job):
        _release_freed_gpus(snapshot, job, runs)


def _is_fresh(observation: Observation, job: Job) -> bool:
    """What the observation does not show of the job does not exist."""
    return observation.converged_generation >= job.allocation.asked_at_generation


def _release_freed_gpus(snapshot: SnapshotBuilder, job: Job, runs: Sequence[Run]) -> None:
    """Releasing GPUs are free once no run of an older generation is seen on them."""
    occupied: Gpus = {}
    for run in runs:
        if run.generation < job.allocation.generation:
            occupied = gpu_sets.union(occupied, run.gpus)
    releasing = gpu_sets.intersection(job.allocation.releasing, occupied)
    if releasing != job.allocation.releasing:
        settled = job.advance_to(snapshot.now_s)
        snapshot.jobs[job.id] = replace(settled, allocation=replace(job.allocation, releasing=releasing))


def _mirror_old_run(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    """A generation that had to leave: it may have finished instead, and it says where the work stands."""
    if job.is_ended or job.state is JobState.RUNNING:
        return job
    if run.phase is RunPhase.SUCCEEDED:
        return _complete_job(snapshot, job, run)
    return _roll_back(snapshot, record_leaving_phases(snapshot, job, run), run) if run.phase in _ENDED_PHASES else job


def _mirror_current_run(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    if job.state not in PLACED_STATES:
        return job
    match run.phase:
        case RunPhase.RUNNING:
            if job.state is not JobState.RUNNING:
                job = snapshot.transition_job(job, JobState.RUNNING)
            job = record_first_step(snapshot, job, run) if run.phases_s else job
            job = record_frozen_layers(snapshot, _record_measurements(snapshot, job, run), run.frozen_layers)
            return _set_checkpoint_target(snapshot, job, run)
        case RunPhase.SUCCEEDED:
            return _complete_job(snapshot, record_first_step(snapshot, job, run), run)
        case RunPhase.FAILED if run.cause is FailureCause.OUT_OF_MEMORY:
            return replan_after_out_of_memory(snapshot, _roll_back(snapshot, job, run), run)
        case RunPhase.FAILED:
            return requeue(
                snapshot, _roll_back(snapshot, job, run), run.reason or "its workers died", counts_as_retry=True
            )
        case RunPhase.LOST | RunPhase.LEFT:
            return requeue(
                snapshot, _roll_back(snapshot, job, run), run.reason or f"it was {run.phase}", counts_as_retry=False
            )
    return job


def _set_checkpoint_target(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    """A checkpoint was asked for now: it has to hold all steps that were done by now."""
    wish = job.pending_checkpoint_request
    if wish is not None and wish.steps is None and run.steps is not None:
        snapshot.jobs[job.id] = job = replace(job, save_wish=replace(wish, steps=max(1.0, run.steps)))
    return job


def _complete_job(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    now_s, generation = snapshot.now_s, snapshot.next_generation
    left = release_gpus(job, JobState.SUCCEEDED, now_s, generation=generation, leave_by_s=now_s)
    steps = run.steps if run.steps is not None else float(job.spec.steps)
    progress = replace(_with_usage(left.progress, run), steps=steps, loss=_latest_loss(left, run))
    return snapshot.record_transition(job, replace(left, progress=progress))


def _latest_loss(job: Job, run: Run) -> float | None:
    return job.progress.loss if run.loss is None else run.loss


def requeue(snapshot: SnapshotBuilder, job: Job, why: str, *, counts_as_retry: bool) -> Job:
    """Give up the present run. A charged failure costs a retry; without one left the job has failed."""
    failures = job.account.failures + (1 if counts_as_retry else 0)
    state = JobState.FAILED if failures > job.spec.retries else JobState.QUEUED
    now_s, generation = snapshot.now_s, snapshot.next_generation
    left = release_gpus(job, state, now_s, generation=generation, leave_by_s=now_s, message=why)
    return snapshot.record_transition(job, replace(left, account=replace(left.account, failures=failures)))


def _roll_back(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    """Work stands at the last checkpoint of a run that is gone; what was done after it is lost and counted.

    What the run reached is what it said, else what its curve predicts. Lost GPU-seconds are lost steps at the
    job's average cost of a step so far, without those that were lost before.
    """
    settled = job.advance_to(snapshot.now_s)
    kept = run.checkpoint_steps if run.checkpoint_steps is not None else settled.progress.checkpoint_steps
    reached = settled.progress.steps if run.steps is None else run.steps
    if kept == job.progress.steps and kept == job.progress.checkpoint_steps and job.state is not JobState.RUNNING:
        return job
    lost_steps = max(0.0, reached - kept)
    account = settled.account
    lost_gpu_s = (account.gpu_s - account.lost_gpu_s) * lost_steps / reached if reached else 0.0
    progress = replace(settled.progress, steps=kept, checkpoint_steps=kept, checkpoint_at_s=snapshot.now_s)
    account = replace(account, lost_gpu_s=account.lost_gpu_s + lost_gpu_s)
    fallen = replace(settled, progress=progress, account=account)
    snapshot.jobs[job.id] = fallen
    if lost_steps:
        snapshot.record_event(
            EventCode.JOB_LOST_WORK,
            job.id,
            f"{lost_steps:.0f} steps since the last checkpoint were lost: {run.reason or run.phase}",
            {"steps": lost_steps, "gpu_s": lost_gpu_s},
            cause=(run.cause or run.phase).value,
        )
    return fallen


def _record_measurements(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    """Take over checkpoints at once, measured progress when the extrapolation has drifted from it."""
    progress = _with_usage(job.progress, run)
    if run.checkpoint_steps is not None and run.checkpoint_steps > progress.checkpoint_steps:
        at_s, steps, correction, loss = progress.at_s, progress.steps, progress.correction, progress.loss
        known, speed, peak = progress.corrections, progress.samples_per_s, progress.peak_bytes
        progress = Progress(at_s, steps, run.checkpoint_steps, snapshot.now_s, correction, loss, known, speed, peak)
    if run.steps is not None and abs(run.steps - job.steps_at(snapshot.now_s)) * job.step_time_s() > _DRIFT_S:
        correction = _compute_correction(snapshot, job, run)
        progress = replace(
            progress, steps=run.steps, at_s=snapshot.now_s, loss=_latest_loss(job, run), correction=correction
        )
    if progress is job.progress:
        return job
    snapshot.jobs[job.id] = measured = job.with_progress(progress)
    return measured


def _with_usage(progress: Progress, run: Run) -> Progress:
    """The progress with the run's speed and memory, where these are news."""
    speed = progress.samples_per_s if run.samples_per_s is None else run.samples_per_s
    peak = progress.peak_bytes if run.peak_bytes is None else max(run.peak_bytes, progress.peak_bytes or 0)
    if not _has_changed(progress.samples_per_s, speed) and not _has_changed(progress.peak_bytes, peak):
        return progress
    return replace(progress, samples_per_s=speed, peak_bytes=peak)


def _has_changed(before: float | None, now: float | None) -> bool:
    return now is not None and (before is None or abs(now - before) > _DRIFT_SHARE * before)


def _compute_correction(snapshot: SnapshotBuilder, job: Job, run: Run) -> float:
    """The job's CurveCorrection after one more measurement: half old, half new, so that one slow minute counts
    little. A measurement needs a whole step and a running plan."""
    elapsed_s = snapshot.now_s - max(job.state_since_s, job.progress.at_s)
    done = (run.steps or 0.0) - job.progress.steps
    plan = job.allocation.plan
    if plan is None or done < 1.0 or elapsed_s <= 0.0:
        return job.progress.correction
    return 0.5 * job.progress.correction + 0.5 * elapsed_s / done / plan.iteration_time_s


def replan_after_out_of_memory(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    """Give up a run that died of memory. The job pauses in PLANNING, from where nothing can start it, until a plan is
    solved that fits by what is known now; after `MEMORY_TRIES_MAX` such deaths it has failed. No retry is used up.

    It goes over to the curve that counts on all its frozen layers at once: under another correction none is solved, so
    that the old one has nothing left to wait by.
    """
    memory = job.memory.with_failure(_build_memory_death(snapshot, job, run), snapshot.now_s)
    state = JobState.FAILED if memory.is_exhausted else JobState.PLANNING
    now_s, generation = snapshot.now_s, snapshot.next_generation
    why = _describe_retry(memory, now_s) if not memory.is_exhausted else _describe_failure(memory)
    why = f"{why}; {run.reason}" if run.reason else why
    left = release_gpus(job, state, now_s, generation=generation, leave_by_s=now_s, message=why)
    return snapshot.record_transition(job, replace(left, memory=memory, freezing=left.freezing.with_current_curve()))


def _build_memory_death(snapshot: SnapshotBuilder, job: Job, run: Run) -> OomFailure:
    plan, target = job.allocation.plan, job.allocation.target
    assert plan is not None, "a run has a plan"
    told = [used for used in (run.peak_bytes, job.progress.peak_bytes) if used is not None]
    return OomFailure(
        plan=plan.summarize(),
        gpus=job.allocation.target_gpus,
        gpu_memory_bytes=min(snapshot.nodes[name].gpu_memory_bytes for name in target),
        predicted_bytes=plan.peak_bytes_per_gpu,
        measured_bytes=max(told, default=None),
    )


def _describe_retry(memory: MemoryRecord, now_s: float) -> str:
    tried, pause_s = len(memory.deaths), (memory.retry_at_s or now_s) - now_s
    taken = f"its peaks are taken as {memory.factor:.2f} times the predicted ones, and " if memory.percent > 100 else ""
    return (
        f"out of memory, try {tried} of {OOM_ATTEMPTS_MAX}: {memory.deaths[-1]}; {taken}it pauses for {pause_s:.0f} s"
    )


def _describe_failure(memory: MemoryRecord) -> str:
    tried = "; ".join(f"{number}. {death}" for number, death in enumerate(memory.deaths, 1))
    return f"out of memory {len(memory.deaths)} times: {tried}"


def record_leaving_phases(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    """Keep what the workers of an ended generation took to leave until the next one runs."""
    left_s = {phase.value: run.phases_s[phase] for phase in SHUTDOWN_PHASES if phase in run.phases_s}
    if not left_s or run.generation < job.replan.generation or left_s == job.replan.left_s:
        return job
    snapshot.jobs[job.id] = noted = replace(job, replan=Replan(job.replan.generation, left_s))
    return noted


def record_first_step(snapshot: SnapshotBuilder, job: Job, run: Run) -> Job:
    """Tell a generation's first step, once. A start that follows no notice is no re-plan and only counted off."""
    if ReplanPhase.FIRST_STEP not in run.phases_s or run.generation <= job.replan.generation:
        return job
    if job.replan.left_s:
        came_s = {phase.value: run.phases_s[phase] for phase in STARTUP_PHASES if phase in run.phases_s}
        phases_s = {**job.replan.left_s, **came_s}
        parts = ", ".join(f"{phase.replace('_', ' ')} {seconds:.1f} s" for phase, seconds in phases_s.items())
        message = f"the re-plan took its workers {sum(phases_s.values()):.1f} s: {parts}"
        numbers = {f"{phase}_s": seconds for phase, seconds in phases_s.items()}
        if run.traffic is not None:
            read_mb, moved_mb = run.traffic.read_bytes / 1e6, run.traffic.moved_bytes / 1e6
            message += f"; they read {read_mb:.1f} MB, of which other nodes had written {moved_mb:.1f} MB"
            numbers |= {name: float(count) for name, count in asdict(run.traffic).items()}
        snapshot.record_event(EventCode.JOB_REPLANNED, job.id, message, numbers)
    snapshot.jobs[job.id] = noted = replace(job, replan=Replan(run.generation))
    return noted
