"""What an executor saw, mirrored into jobs, nodes and loans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.core.apply import released
from scheduler.core.frozen_layers import freeze
from scheduler.core.intake import Intake
from scheduler.core.memory_death import plan_anew
from scheduler.core.replan_story import note_first_step, note_leaving
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.event import EventCode
from scheduler.domain.fleet import Node, NodeState
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_state import PLACED, JobState
from scheduler.domain.loan import LoanState
from scheduler.domain.observation import FailureCause, NodeFacts, Observation, Run, RunPhase

_GONE = (RunPhase.LEFT, RunPhase.LOST, RunPhase.FAILED)
_DRIFT_S = 5.0
"""Measured progress replaces the extrapolated one when they are this far apart: rarer writes, same truth."""
_DRIFT_SHARE = 0.05
"""Likewise measured speed and memory those that are known."""


def mirror_nodes(intake: Intake, observation: Observation) -> None:
    ledger, nodes = intake.base.ledger, intake.base.nodes
    if ledger.heard_nodes and ledger.heard_nodes[0] is observation.nodes and ledger.heard_nodes[1] is nodes:
        return
    for name, facts in observation.nodes.items():
        node = nodes.get(name)
        if node is not None and not _is_known(node, facts):
            _mirror_node(intake, node, facts)
    if not intake.nodes.written:
        ledger.heard_nodes = (observation.nodes, nodes)


def _is_known(node: Node, facts: NodeFacts) -> bool:
    same_use = node.inference_gpus == facts.inference_gpus and node.other_gpus == facts.other_gpus
    return same_use and (node.state is NodeState.UP) == facts.up


def _mirror_node(intake: Intake, node: Node, facts: NodeFacts) -> None:
    state, name = NodeState.UP if facts.up else NodeState.DOWN, node.name
    intake.nodes[name] = replace(node, state=state, inference_gpus=facts.inference_gpus, other_gpus=facts.other_gpus)
    if state is not node.state:
        intake.tell(EventCode.NODE_CHANGED, name, f"{name} went {state}")
    loan = intake.loans.get(name)
    if state is NodeState.DOWN and loan is not None and loan.is_live:
        intake.loans[name] = loan.moved(LoanState.LOST, intake.now_s)
        intake.tell(EventCode.LOAN_LOST, name, f"{name} went down while it was lent")


def mirror_runs(intake: Intake, observation: Observation) -> None:
    ledger = intake.base.ledger
    told, quiet = _news(intake, observation)
    jobs = intake.jobs
    affected = {job_id for job_id in told if job_id in jobs} | ledger.releasing
    running = sum(job_id in ledger.running for job_id in told)
    if quiet + running < len(ledger.running):  # some job that should run shows no run at all
        seen = {run.job_id for run in observation.runs}
        affected |= ledger.running - seen
    for job in sorted((jobs[job_id] for job_id in affected), key=lambda job: (job.submitted_at_s, job.id)):
        runs = told.get(job.id, ())
        _mirror_job(intake, job, runs, observation)
        if len(runs) == 1 and jobs[job.id] is job and _is_in_place(job, runs[0]):
            ledger.heard[job.id] = runs[0]


def _is_in_place(job: Job, run: Run) -> bool:
    """A run that does what it should and tells nothing by itself."""
    allocation = job.allocation
    settled = job.state is JobState.RUNNING and not allocation.releasing
    return settled and run.steps is None and run.gpus is allocation.target


def _news(intake: Intake, observation: Observation) -> tuple[Mapping[str, Sequence[Run]], int]:
    """All runs of the jobs that may have something new, and how many other running jobs show a run."""
    heard, runs = intake.base.ledger.heard, observation.runs
    news = {run.job_id for run in runs if heard.get(run.job_id) is not run} | intake.base.ledger.releasing
    listed = [run for run in runs if run.job_id in news] if news else []
    told: defaultdict[str, list[Run]] = defaultdict(list)
    for run in listed:
        told[run.job_id].append(run)
    return told, len(runs) - len(listed)


def _mirror_job(intake: Intake, job: Job, runs: Sequence[Run], observation: Observation) -> None:
    """A later generation's word on where the work stands counts more than an earlier one's."""
    generation = job.allocation.generation
    current = [run for run in runs if run.generation == generation]
    older = sorted((run for run in runs if run.generation < generation), key=lambda run: run.generation)
    for run in [run for run in older if run.phase is RunPhase.SUCCEEDED] or older[-1:]:
        job = _mirror_old_run(intake, job, run)
    if not current and job.state is JobState.RUNNING and _is_fresh(observation, job):
        current = [Run(job.id, generation, RunPhase.LOST, reason="its workers are gone without a word")]
    for run in current:
        job = _mirror_current_run(intake, job, run)
    if job.allocation.releasing and _is_fresh(observation, job):
        _free(intake, job, runs)


def _is_fresh(observation: Observation, job: Job) -> bool:
    """What the observation does not show of the job does not exist."""
    return observation.converged_generation >= job.allocation.asked_at_generation


def _free(intake: Intake, job: Job, runs: Sequence[Run]) -> None:
    """Releasing GPUs are free once no run of an older generation is seen on them."""
    occupied: Gpus = {}
    for run in runs:
        if run.generation < job.allocation.generation:
            occupied = gpu_sets.union(occupied, run.gpus)
    releasing = gpu_sets.common(job.allocation.releasing, occupied)
    if releasing != job.allocation.releasing:
        settled = job.settled(intake.now_s)
        intake.jobs[job.id] = replace(settled, allocation=replace(job.allocation, releasing=releasing))


def _mirror_old_run(intake: Intake, job: Job, run: Run) -> Job:
    """A generation that had to leave: it may have finished instead, and it says where the work stands."""
    if job.is_ended or job.state is JobState.RUNNING:
        return job
    if run.phase is RunPhase.SUCCEEDED:
        return _succeed(intake, job, run)
    return _fall_back(intake, note_leaving(intake, job, run), run) if run.phase in _GONE else job


def _mirror_current_run(intake: Intake, job: Job, run: Run) -> Job:
    if job.state not in PLACED:
        return job
    match run.phase:
        case RunPhase.RUNNING:
            if job.state is not JobState.RUNNING:
                job = intake.move_job(job, JobState.RUNNING)
            job = note_first_step(intake, job, run) if run.phases_s else job
            job = freeze(intake, _measure(intake, job, run), run.frozen_layers)
            return _date_wish(intake, job, run)
        case RunPhase.SUCCEEDED:
            return _succeed(intake, note_first_step(intake, job, run), run)
        case RunPhase.FAILED if run.cause is FailureCause.OUT_OF_MEMORY:
            return plan_anew(intake, _fall_back(intake, job, run), run)
        case RunPhase.FAILED:
            return requeue(intake, _fall_back(intake, job, run), run.reason or "its workers died", charged=True)
        case RunPhase.LOST | RunPhase.LEFT:
            return requeue(intake, _fall_back(intake, job, run), run.reason or f"it was {run.phase}", charged=False)
    return job


def _date_wish(intake: Intake, job: Job, run: Run) -> Job:
    """A checkpoint was asked for now: it has to hold all steps that were done by now."""
    wish = job.awaited_checkpoint
    if wish is not None and wish.steps is None and run.steps is not None:
        intake.jobs[job.id] = job = replace(job, save_wish=replace(wish, steps=max(1.0, run.steps)))
    return job


def _succeed(intake: Intake, job: Job, run: Run) -> Job:
    now_s, generation = intake.now_s, intake.next_generation
    left = released(job, JobState.SUCCEEDED, now_s, generation=generation, leave_by_s=now_s)
    steps = run.steps if run.steps is not None else float(job.spec.steps)
    progress = replace(_with_use(left.progress, run), steps=steps, loss=_loss(left, run))
    return intake.put_moved(job, replace(left, progress=progress))


def _loss(job: Job, run: Run) -> float | None:
    return job.progress.loss if run.loss is None else run.loss


def requeue(intake: Intake, job: Job, why: str, *, charged: bool) -> Job:
    """Give up the present run. A charged failure costs a retry; without one left the job has failed."""
    failures = job.account.failures + (1 if charged else 0)
    state = JobState.FAILED if failures > job.spec.retries else JobState.QUEUED
    now_s, generation = intake.now_s, intake.next_generation
    left = released(job, state, now_s, generation=generation, leave_by_s=now_s, message=why)
    return intake.put_moved(job, replace(left, account=replace(left.account, failures=failures)))


def _fall_back(intake: Intake, job: Job, run: Run) -> Job:
    """Work stands at the last checkpoint of a run that is gone; what was done after it is lost and counted.

    What the run reached is what it said, else what its curve predicts. Lost GPU-seconds are lost steps at the
    job's average cost of a step so far, without those that were lost before.
    """
    settled = job.settled(intake.now_s)
    kept = run.checkpoint_steps if run.checkpoint_steps is not None else settled.progress.checkpoint_steps
    reached = settled.progress.steps if run.steps is None else run.steps
    if kept == job.progress.steps and kept == job.progress.checkpoint_steps and job.state is not JobState.RUNNING:
        return job
    lost_steps = max(0.0, reached - kept)
    account = settled.account
    lost_gpu_s = (account.gpu_s - account.lost_gpu_s) * lost_steps / reached if reached else 0.0
    progress = replace(settled.progress, steps=kept, checkpoint_steps=kept, checkpoint_at_s=intake.now_s)
    account = replace(account, lost_gpu_s=account.lost_gpu_s + lost_gpu_s)
    fallen = replace(settled, progress=progress, account=account)
    intake.jobs[job.id] = fallen
    if lost_steps:
        intake.tell(
            EventCode.JOB_LOST_WORK,
            job.id,
            f"{lost_steps:.0f} steps since the last checkpoint were lost: {run.reason or run.phase}",
            {"steps": lost_steps, "gpu_s": lost_gpu_s},
            cause=(run.cause or run.phase).value,
        )
    return fallen


def _measure(intake: Intake, job: Job, run: Run) -> Job:
    """Take over checkpoints at once, measured progress when the extrapolation has drifted from it."""
    progress = _with_use(job.progress, run)
    if run.checkpoint_steps is not None and run.checkpoint_steps > progress.checkpoint_steps:
        at_s, steps, correction, loss = progress.at_s, progress.steps, progress.correction, progress.loss
        known, speed, peak = progress.corrections, progress.samples_per_s, progress.peak_bytes
        progress = Progress(at_s, steps, run.checkpoint_steps, intake.now_s, correction, loss, known, speed, peak)
    if run.steps is not None and abs(run.steps - job.steps_at(intake.now_s)) * job.step_time_s() > _DRIFT_S:
        correction = _corrected(intake, job, run)
        progress = replace(progress, steps=run.steps, at_s=intake.now_s, loss=_loss(job, run), correction=correction)
    if progress is job.progress:
        return job
    intake.jobs[job.id] = measured = job.measured(progress)
    return measured


def _with_use(progress: Progress, run: Run) -> Progress:
    """The progress with the run's speed and memory, where these are news."""
    speed = progress.samples_per_s if run.samples_per_s is None else run.samples_per_s
    peak = progress.peak_bytes if run.peak_bytes is None else max(run.peak_bytes, progress.peak_bytes or 0)
    if not _is_news(progress.samples_per_s, speed) and not _is_news(progress.peak_bytes, peak):
        return progress
    return replace(progress, samples_per_s=speed, peak_bytes=peak)


def _is_news(before: float | None, now: float | None) -> bool:
    return now is not None and (before is None or abs(now - before) > _DRIFT_SHARE * before)


def _corrected(intake: Intake, job: Job, run: Run) -> float:
    """The job's CurveCorrection after one more measurement: half old, half new, so that one slow minute counts
    little. A measurement needs a whole step and a running plan."""
    elapsed_s = intake.now_s - max(job.state_since_s, job.progress.at_s)
    done = (run.steps or 0.0) - job.progress.steps
    plan = job.allocation.plan
    if plan is None or done < 1.0 or elapsed_s <= 0.0:
        return job.progress.correction
    return 0.5 * job.progress.correction + 0.5 * elapsed_s / done / plan.iteration_time_s
