"""What people asked for, put into the snapshot: one function a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scheduler.core.intake import Intake
from scheduler.core.preconditions import unmet
from scheduler.core.progress import take_report
from scheduler.domain.command import (
    AddNode,
    CancelJob,
    ChangeJob,
    ChangeQueue,
    CheckpointJob,
    Command,
    CordonNode,
    CreatePool,
    CreateQueue,
    CurveSolved,
    DeletePool,
    DeleteQueue,
    ForecastMade,
    FreezeResizes,
    PauseLending,
    RecallAll,
    RemoveNode,
    ReportDemand,
    ReportProgress,
    ResumeJob,
    ResumeLending,
    ScaleJob,
    SetLendingPolicy,
    SolverChanged,
    SubmitJob,
    SuspendJob,
    UncordonNode,
)
from scheduler.domain.event import EventCode, JobStep
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Intent, Job, JobAccount, Progress
from scheduler.domain.job_state import JobState
from scheduler.domain.saving import SaveWish
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Switches


def obey(intake: Intake, command: Command) -> None:
    """Take one command in. One that no longer fits the state is refused by an event and changes nothing."""
    if refusal := unmet(intake, command):
        intake.events.append(refusal)
        return
    match command.body:
        case SubmitJob() as submit:
            _submit(intake, submit, command)
        case CancelJob(job_id=job_id):
            _intend(intake, job_id, Intent.CANCEL)
        case SuspendJob(job_id=job_id):
            _intend(intake, job_id, Intent.SUSPEND)
        case ResumeJob(job_id=job_id):
            _resume(intake, job_id)
        case CheckpointJob(job_id=job_id):
            _checkpoint(intake, job_id)
        case ScaleJob() as scale:
            _scale(intake, scale)
        case ChangeJob() as change:
            _change_job(intake, change)
        case ReportProgress() as report:
            take_report(intake, report, command.at_s)
        case CreatePool() | DeletePool() | SetLendingPolicy() as change:
            _change_pool(intake, change)
        case CreateQueue() | ChangeQueue() | DeleteQueue() as change:
            _change_queue(intake, change)
        case AddNode() | RemoveNode() | CordonNode() | UncordonNode() as change:
            _change_node(intake, change)
        case ReportDemand() as report:
            _demand(intake, report, command.at_s)
        case PauseLending() | ResumeLending() | RecallAll() | FreezeResizes() as switch:
            _switch(intake, switch)
        case CurveSolved() as solved:
            _curve(intake, solved)
        case SolverChanged(solver=solver) if solver != intake.solver:
            _drop_curves(intake, solver)
        case ForecastMade(pool=pool, forecast=forecast):
            if pool in intake.pools:
                intake.forecasts[pool] = forecast


def _submit(intake: Intake, submit: SubmitJob, command: Command) -> None:
    """A job without a model but with a length and an estimate starts with the step time that these imply."""
    spec, job_id = submit.spec, submit.job_id
    if job_id in intake.jobs:
        intake.refuse(job_id, f"job {job_id} was submitted before")
        return
    correction = 1.0
    if not spec.has_profile and spec.steps and spec.duration_estimate_s:
        correction = spec.duration_estimate_s * spec.min_gpus / spec.steps
    progress = Progress(at_s=intake.now_s, checkpoint_at_s=intake.now_s, correction=correction)
    submitted_at_s = min(command.at_s, intake.now_s)
    account = JobAccount(settled_at_s=submitted_at_s)
    intake.jobs[job_id] = Job(
        job_id,
        spec,
        JobState.SUBMITTED,
        submitted_at_s,
        intake.now_s,
        progress=progress,
        account=account,
        owner=command.actor,
    )
    message = f"submitted: {spec.name}, {spec.min_gpus} to {spec.max_gpus} GPUs"
    intake.tell(EventCode.JOB_STATE, job_id, message, job=JobStep(JobState.SUBMITTED))


def _live_job(intake: Intake, job_id: str) -> Job | None:
    job = intake.jobs.get(job_id)
    if job is None or job.is_ended:
        intake.refuse(job_id, f"job {job_id} does not exist or has ended")
        return None
    return job


def _intend(intake: Intake, job_id: str, intent: Intent) -> None:
    job = _live_job(intake, job_id)
    if job is not None and job.intent is not Intent.CANCEL:
        intake.jobs[job_id] = replace(job, intent=intent)


def _resume(intake: Intake, job_id: str) -> None:
    job = _live_job(intake, job_id)
    if job is None or job.intent is not Intent.SUSPEND:
        return
    intake.jobs[job_id] = job = replace(job, intent=Intent.RUN)
    if job.state is JobState.SUSPENDED:
        intake.move_job(job, JobState.QUEUED)


def _checkpoint(intake: Intake, job_id: str) -> None:
    """One that is waited for already is not asked for again."""
    job = _live_job(intake, job_id)
    if job is None or job.awaited_checkpoint is not None:
        return
    if job.state is not JobState.RUNNING:
        intake.refuse(job_id, f"job {job_id} is {job.state}: only a running job can save a checkpoint")
        return
    intake.jobs[job_id] = replace(job, save_wish=SaveWish(intake.now_s, job.allocation.generation))


def _scale(intake: Intake, scale: ScaleJob) -> None:
    changed = _changed(intake, scale.job_id, {"min_gpus": scale.min_gpus, "max_gpus": scale.max_gpus})
    if changed is not None:
        _tell_range(intake, changed)


def _change_job(intake: Intake, change: ChangeJob) -> None:
    given = {name: getattr(change, name) for name in ("queue", "priority", "min_gpus", "max_gpus")}
    job = _changed(intake, change.job_id, {name: value for name, value in given.items() if value is not None})
    if job is None:
        return
    if change.min_gpus is not None or change.max_gpus is not None:
        _tell_range(intake, job)
    if change.queue is not None or change.priority is not None:
        told = f"it is in queue {job.spec.queue} now, with priority {job.spec.priority}"
        intake.tell(EventCode.JOB_STATE, job.id, told)


def _changed(intake: Intake, job_id: str, values: Mapping[str, Any]) -> Job | None:
    """The job with these values in its spec; None where it is refused."""
    job = _live_job(intake, job_id)
    if job is None:
        return None
    try:
        intake.jobs[job.id] = job = replace(job, spec=replace(job.spec, **values))
    except ValueError as wrong:
        intake.refuse(job_id, str(wrong))
        return None
    return job


def _tell_range(intake: Intake, job: Job) -> None:
    told = f"its range is now {job.spec.min_gpus} to {job.spec.max_gpus} GPUs"
    intake.tell(EventCode.JOB_STATE, job.id, told)


def _change_pool(intake: Intake, change: CreatePool | DeletePool | SetLendingPolicy) -> None:
    match change:
        case CreatePool(pool=pool):
            if pool.name in intake.pools:
                intake.refuse(pool.name, f"pool {pool.name} exists already")
                return
            intake.pools[pool.name] = pool
            intake.tell(EventCode.POOL_CHANGED, pool.name, f"{pool.kind} pool {pool.name} was created")
        case DeletePool(name=name):
            if any(node.pool == name for node in intake.nodes.values()) or name not in intake.pools:
                intake.refuse(name, f"pool {name} does not exist or still has nodes")
                return
            for mapping in (intake.pools, intake.demand, intake.forecasts):
                mapping.pop(name, None)
            intake.tell(EventCode.POOL_CHANGED, name, f"pool {name} was deleted")
        case SetLendingPolicy(pool=name, lending=lending):
            if name not in intake.pools:
                intake.refuse(name, f"pool {name} does not exist")
                return
            intake.pools[name] = replace(intake.pools[name], lending=lending)
            intake.tell(EventCode.POOL_CHANGED, name, f"the lending policy of {name} changed")


def _change_queue(intake: Intake, change: CreateQueue | ChangeQueue | DeleteQueue) -> None:
    name = change.name if isinstance(change, DeleteQueue) else change.queue.name
    if (name in intake.queues) is isinstance(change, CreateQueue):
        intake.refuse(name, f"queue {name} {'exists already' if name in intake.queues else 'does not exist'}")
        return
    if isinstance(change, DeleteQueue):
        intake.queues.pop(name)
        intake.tell(EventCode.QUEUE_CHANGED, name, f"queue {name} was deleted")
        return
    queue = intake.queues[name] = change.queue
    limit = "no limit" if queue.limit_gpus is None else f"limit {queue.limit_gpus}"
    if queue.user_limit_gpus is not None:
        limit = f"{limit}, {queue.user_limit_gpus} for one user"
    message = f"queue {name}: {queue.guaranteed_gpus} GPUs guaranteed, {limit}, weight {queue.weight:g}"
    intake.tell(EventCode.QUEUE_CHANGED, name, message)


def _change_node(intake: Intake, change: AddNode | RemoveNode | CordonNode | UncordonNode) -> None:
    name = change.node.name if isinstance(change, AddNode) else change.name
    node = intake.nodes.get(name)
    if isinstance(change, AddNode):
        if node is not None or change.node.pool not in intake.pools:
            intake.refuse(name, f"node {name} is registered already, or pool {change.node.pool} does not exist")
            return
        intake.nodes[name] = change.node
        intake.tell(EventCode.NODE_CHANGED, name, f"{name} joined pool {change.node.pool}: {change.node.gpus} GPUs")
        return
    if node is None:
        intake.refuse(name, f"node {name} does not exist")
        return
    match change:
        case RemoveNode():
            loan = intake.loans.get(name)
            held = any(name in job.allocation.held for job in intake.jobs.values())
            if held or (loan is not None and loan.is_live):
                intake.refuse(name, f"node {name} is lent or its GPUs are held: drain it first")
                return
            del intake.nodes[name]
            intake.tell(EventCode.NODE_CHANGED, name, f"{name} was removed")
        case CordonNode(drain=drain):
            intake.nodes[name] = replace(node, cordoned=True, draining=node.draining or drain)
            intake.tell(EventCode.NODE_CHANGED, name, f"{name} is {'draining' if drain else 'cordoned'}")
        case UncordonNode():
            intake.nodes[name] = replace(node, cordoned=False, draining=False)
            intake.tell(EventCode.NODE_CHANGED, name, f"{name} takes jobs again")


def _demand(intake: Intake, report: ReportDemand, at_s: float) -> None:
    """Demand above the pool's capacity is accepted and clamped: it recalls everything, and people are told."""
    if report.pool not in intake.pools:
        intake.refuse(report.pool, f"pool {report.pool} does not exist")
        return
    previous = intake.demand.get(report.pool)
    if previous is not None and previous.at_s > at_s:
        return
    capacity = intake.capacity(report.pool)
    reading = DemandReading(min(at_s, intake.now_s), min(report.gpus, float(capacity)), report.gpus)
    intake.demand[report.pool] = reading
    intake.readings.append((report.pool, reading))
    if report.gpus > capacity:
        message = f"{report.pool} asks for {report.gpus:.1f} GPUs and has {capacity}: clamped"
        numbers = {"asked_gpus": report.gpus, "capacity_gpus": float(capacity)}
        intake.tell(EventCode.DEMAND_CLAMPED, report.pool, message, numbers)


def _switch(intake: Intake, switch: PauseLending | ResumeLending | RecallAll | FreezeResizes) -> None:
    match switch:
        case PauseLending():
            intake.switches = replace(intake.switches, lending_paused=True)
        case RecallAll():
            intake.switches = replace(intake.switches, lending_paused=True, loans_recalled=True)
        case ResumeLending():
            intake.switches = Switches(resizes_frozen=intake.switches.resizes_frozen)
        case FreezeResizes(frozen=frozen):
            intake.switches = replace(intake.switches, resizes_frozen=frozen)
    intake.tell(EventCode.LENDING_SWITCHED, "fleet", type(switch).__name__)


def _curve(intake: Intake, solved: CurveSolved) -> None:
    curve = intake.curves.get(solved.curve_key, ScalingCurve())
    if solved.plan is not None:
        intake.curves[solved.curve_key] = curve.with_plan(solved.shape, solved.plan)
    else:
        intake.curves[solved.curve_key] = curve.with_infeasible(solved.shape, solved.infeasible)


def _drop_curves(intake: Intake, solver: str) -> None:
    """Running jobs keep their plans; what jobs want is solved anew."""
    if intake.curves:
        message = f"another solver, {solver}: the points of {len(intake.curves)} curves are solved anew"
        intake.tell(EventCode.CURVES_DROPPED, "solver", message)
    intake.curves.clear()
    intake.solver = solver
