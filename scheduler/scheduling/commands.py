"""Apply commands to a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scheduler.domain.checkpoints import CheckpointRequest
from scheduler.domain.commands import (
    AddNode,
    CancelJob,
    ChangeJob,
    ChangeNode,
    ChangeQueue,
    CheckpointJob,
    Command,
    CordonNode,
    CreatePool,
    CreateQueue,
    CurveSolved,
    DeleteGpuProfile,
    DeletePool,
    DeleteQueue,
    DeleteSecret,
    DemandSourceFailed,
    ForecastMade,
    FreezeResizes,
    GpuThroughputsChanged,
    PauseLending,
    RecallAll,
    RemoveNode,
    ReportDemand,
    ReportDemandHistory,
    ReportProgress,
    ResumeJob,
    ResumeLending,
    ScaleJob,
    SetDemandSource,
    SetGpuProfile,
    SetLendingPolicy,
    SetPoolNetwork,
    SetSecret,
    SetServedModels,
    SolverChanged,
    SubmitJob,
    SuspendJob,
    UncordonNode,
    VetoLoan,
)
from scheduler.domain.demand_source import describe_source_conflict
from scheduler.domain.events import EventCode, JobStep
from scheduler.domain.fleet import LoanState, Node, find_lendable_gpus_problem
from scheduler.domain.hardware import GpuProfile
from scheduler.domain.job import Intent, Job, Progress
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_labels import compute_label_changes, format_label_changes, merge_labels
from scheduler.domain.job_queue import describe_quota
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.shortages import ShortageRecord
from scheduler.domain.snapshot import Switches
from scheduler.scheduling.demand_reports import record_demand, record_demand_history
from scheduler.scheduling.job_progress import record_progress
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.preconditions import check_preconditions
from scheduler.scheduling.step_learning import forget_measurements


def apply_command(snapshot: MutableSnapshot, command: Command) -> None:
    """Apply one command. A command that no longer fits the state has no effect except a refusal event."""
    if refusal := check_preconditions(snapshot, command):
        snapshot.events.append(refusal)
        return
    match command.body:
        case SubmitJob() as submit:
            _submit_job(snapshot, submit, command)
        case CancelJob(job_id=job_id):
            _set_intent(snapshot, job_id, Intent.CANCEL)
        case SuspendJob(job_id=job_id):
            _set_intent(snapshot, job_id, Intent.SUSPEND)
        case ResumeJob(job_id=job_id):
            _resume_job(snapshot, job_id)
        case CheckpointJob(job_id=job_id):
            _request_checkpoint(snapshot, job_id)
        case ScaleJob() as scale:
            _scale_job(snapshot, scale)
        case ChangeJob() as change:
            _change_job(snapshot, change)
        case ReportProgress() as report:
            record_progress(snapshot, report, command.at_s)
        case (
            CreatePool() | DeletePool() | SetLendingPolicy() | SetPoolNetwork() | SetDemandSource() | SetServedModels()
        ) as change:
            _change_pool(snapshot, change)
        case SetGpuProfile() as change:
            _set_gpu_profile(snapshot, change, command)
        case DeleteGpuProfile(name=name):
            _delete_gpu_profile(snapshot, name)
        case CreateQueue() | ChangeQueue() | DeleteQueue() as change:
            _change_queue(snapshot, change)
        case SetSecret() | DeleteSecret() as change:
            _change_secret(snapshot, change)
        case AddNode() | RemoveNode() | CordonNode() | UncordonNode() | ChangeNode() as change:
            _change_node(snapshot, change)
        case ReportDemand() as report:
            record_demand(snapshot, report, command.at_s)
        case ReportDemandHistory() as report:
            record_demand_history(snapshot, report)
        case DemandSourceFailed(pool=pool, reason=reason, message=message):
            if pool in snapshot.pools:
                text = f"the demand of pool {pool} is unknown: {message}"
                snapshot.record_event(EventCode.DEMAND_UNKNOWN, pool, text, cause=reason)
        case PauseLending() | ResumeLending() | RecallAll() | FreezeResizes() as switch:
            _apply_switch(snapshot, switch, command)
        case VetoLoan() as veto:
            _veto_loan(snapshot, veto, command)
        case CurveSolved() as solved:
            _record_curve_point(snapshot, solved)
        case SolverChanged() as change:
            _drop_outdated_curves(snapshot, change)
        case GpuThroughputsChanged(throughputs=throughputs) if throughputs != snapshot.gpu_throughputs:
            snapshot.gpu_throughputs = throughputs
        case ForecastMade(pool=pool, forecast=forecast):
            if pool in snapshot.pools:
                snapshot.forecasts[pool] = forecast


def _submit_job(snapshot: MutableSnapshot, submit: SubmitJob, command: Command) -> None:
    """Add a job. Without a model, its first step time follows from its length and its duration estimate."""
    spec, job_id = submit.spec, submit.job_id
    if job_id in snapshot.jobs:
        snapshot.refuse(job_id, f"job {job_id} already exists")
        return
    correction = 1.0
    if not spec.has_profile and spec.steps and spec.duration_estimate_s:
        correction = spec.duration_estimate_s * spec.min_gpus / spec.steps
    progress = Progress(at_s=snapshot.now_s, checkpoint_at_s=snapshot.now_s, correction=correction)
    submitted_at_s = min(command.at_s, snapshot.now_s)
    account = JobAccount(settled_at_s=submitted_at_s)
    job = Job(job_id, spec, JobState.SUBMITTED, submitted_at_s, snapshot.now_s, progress=progress, account=account)
    snapshot.put_job(replace(job, owner=command.actor, owner_id=command.actor_id))
    message = f"submitted: {spec.name}, {spec.min_gpus} to {spec.max_gpus} GPUs"
    snapshot.record_event(EventCode.JOB_STATE, job_id, message, job=JobStep(JobState.SUBMITTED))


def _get_live_job(snapshot: MutableSnapshot, job_id: str) -> Job | None:
    job = snapshot.jobs.get(job_id)
    if job is None or job.is_ended:
        snapshot.refuse(job_id, f"job {job_id} does not exist or has ended")
        return None
    return job


def _set_intent(snapshot: MutableSnapshot, job_id: str, intent: Intent) -> None:
    job = _get_live_job(snapshot, job_id)
    if job is not None and job.intent is not Intent.CANCEL:
        snapshot.put_job(replace(job, intent=intent))


def _resume_job(snapshot: MutableSnapshot, job_id: str) -> None:
    job = _get_live_job(snapshot, job_id)
    if job is None or job.intent is not Intent.SUSPEND:
        return
    job = replace(job, intent=Intent.RUN)
    snapshot.put_job(job)
    if job.state is JobState.SUSPENDED:
        snapshot.transition_job(job, JobState.QUEUED)


def _request_checkpoint(snapshot: MutableSnapshot, job_id: str) -> None:
    """Request a checkpoint, unless one is pending."""
    job = _get_live_job(snapshot, job_id)
    if job is None or job.pending_checkpoint_request is not None:
        return
    if job.state is not JobState.RUNNING:
        snapshot.refuse(job_id, f"job {job_id} is {job.state}; only a running job can save a checkpoint")
        return
    snapshot.put_job(replace(job, save_wish=CheckpointRequest(snapshot.now_s, job.allocation.generation)))


def _scale_job(snapshot: MutableSnapshot, scale: ScaleJob) -> None:
    changed = _replace_spec(snapshot, scale.job_id, {"min_gpus": scale.min_gpus, "max_gpus": scale.max_gpus})
    if changed is not None:
        _record_range_change(snapshot, changed)


def _change_job(snapshot: MutableSnapshot, change: ChangeJob) -> None:
    given = {name: getattr(change, name) for name in ("queue", "priority", "min_gpus", "max_gpus")}
    values = {name: value for name, value in given.items() if value is not None}
    before = snapshot.jobs.get(change.job_id)
    if change.labels is not None and before is not None:
        values["labels"] = merge_labels(before.spec.labels, change.labels)
    job = _replace_spec(snapshot, change.job_id, values)
    if job is None or before is None:
        return
    if change.min_gpus is not None or change.max_gpus is not None:
        _record_range_change(snapshot, job)
    if change.queue is not None and job.missing_secrets:
        job = replace(job, missing_secrets=())  # the request was refused unless the queue has all of them
        snapshot.put_job(job)
    if change.queue is not None or change.priority is not None:
        message = f"moved to queue {job.spec.queue} with priority {job.spec.priority}"
        snapshot.record_event(EventCode.JOB_STATE, job.id, message)
    if label_changes := compute_label_changes(before.spec.labels, job.spec.labels):
        message = f"labels changed: {format_label_changes(label_changes)}"
        snapshot.record_event(EventCode.JOB_STATE, job.id, message)


def _replace_spec(snapshot: MutableSnapshot, job_id: str, values: Mapping[str, Any]) -> Job | None:
    """Replace values of the job's spec. Return None if the change is refused."""
    job = _get_live_job(snapshot, job_id)
    if job is None:
        return None
    try:
        job = replace(job, spec=replace(job.spec, **values))
    except ValueError as error:
        snapshot.refuse(job_id, str(error))
        return None
    snapshot.put_job(job)
    return job


def _record_range_change(snapshot: MutableSnapshot, job: Job) -> None:
    message = f"range changed to {job.spec.min_gpus} to {job.spec.max_gpus} GPUs"
    snapshot.record_event(EventCode.JOB_STATE, job.id, message)


def _change_pool(
    snapshot: MutableSnapshot,
    change: CreatePool | DeletePool | SetLendingPolicy | SetPoolNetwork | SetDemandSource | SetServedModels,
) -> None:
    match change:
        case CreatePool(pool=pool):
            if pool.name in snapshot.pools:
                snapshot.refuse(pool.name, f"pool {pool.name} already exists")
                return
            snapshot.pools[pool.name] = pool
            snapshot.record_event(EventCode.POOL_CHANGED, pool.name, f"{pool.kind} pool {pool.name} was created")
        case DeletePool(name=name):
            if any(node.pool == name for node in snapshot.nodes.values()) or name not in snapshot.pools:
                snapshot.refuse(name, f"pool {name} does not exist or still has nodes")
                return
            for mapping in (
                snapshot.pools,
                snapshot.demand,
                snapshot.forecasts,
                snapshot.shadows,
                snapshot.return_times,
            ):
                mapping.pop(name, None)
            snapshot.record_event(EventCode.POOL_CHANGED, name, f"pool {name} was deleted")
        case SetLendingPolicy(pool=name, lending=lending):
            if name in snapshot.pools:
                _change_shadow_mode(snapshot, name, lending)
            _replace_in_pool(snapshot, name, "the lending policy of pool {} was changed", lending=lending)
        case SetPoolNetwork(pool=name, network=network):
            _replace_in_pool(snapshot, name, "the network of pool {} was changed", network=network)
        case SetDemandSource(pool=name, source=source):
            _replace_in_pool(snapshot, name, "the demand source of pool {} was changed", demand=source)
        case SetServedModels(pool=name, models=models):
            _replace_in_pool(snapshot, name, "the models that pool {} serves were changed", serving=models)


def _replace_in_pool(snapshot: MutableSnapshot, name: str, message: str, **values: Any) -> None:
    """Replace values of a pool, and record the event. `message` has a place for the pool's name."""
    if name not in snapshot.pools:
        snapshot.refuse(name, f"pool {name} does not exist")
        return
    pool = replace(snapshot.pools[name], **values)
    # Two requests at once: the API accepted each without the other.
    if conflict := describe_source_conflict(pool.demand, (each.model for each in pool.serving)):
        snapshot.refuse(name, f"pool {name}: {conflict}. Delete its source first")
        return
    snapshot.pools[name] = pool
    snapshot.record_event(EventCode.POOL_CHANGED, name, message.format(name))


def _change_shadow_mode(snapshot: MutableSnapshot, name: str, lending: LendingPolicy) -> None:
    """Begin or end the record of shadow mode.

    The pool's record of shortages continues from one mode to the other, so that lending starts with the promise as the
    shadow has kept or spent it. A record of a time without lending proves nothing, so the shadow starts a new one.
    """
    before, reading = snapshot.pools[name].lending, snapshot.demand.get(name)
    if before.is_shadow == lending.is_shadow:
        return
    snapshot.shadows.pop(name, None)
    if lending.is_shadow and not before.enabled and reading is not None:
        snapshot.demand[name] = replace(reading, shortages=ShortageRecord())


def _set_gpu_profile(snapshot: MutableSnapshot, change: SetGpuProfile, command: Command) -> None:
    before = snapshot.gpu_profiles.get(change.name)
    version = 1 if before is None else before.version + 1
    profile = GpuProfile(change.name, change.profile_json, version, command.at_s, command.actor)
    snapshot.gpu_profiles[change.name] = profile
    message = f"version {version} of the profile of GPU {change.name} was set"
    snapshot.record_event(EventCode.HARDWARE_CHANGED, change.name, message)


def _delete_gpu_profile(snapshot: MutableSnapshot, name: str) -> None:
    if snapshot.gpu_profiles.pop(name, None) is None:
        snapshot.refuse(name, f"no profile of GPU {name} was set")
        return
    snapshot.record_event(EventCode.HARDWARE_CHANGED, name, f"the profile of GPU {name} that was set was deleted")


def _change_queue(snapshot: MutableSnapshot, change: CreateQueue | ChangeQueue | DeleteQueue) -> None:
    name = change.name if isinstance(change, DeleteQueue) else change.queue.name
    if (name in snapshot.queues) is isinstance(change, CreateQueue):
        snapshot.refuse(name, f"queue {name} {'already exists' if name in snapshot.queues else 'does not exist'}")
        return
    if isinstance(change, DeleteQueue):
        snapshot.queues.pop(name)
        snapshot.record_event(EventCode.QUEUE_CHANGED, name, f"queue {name} was deleted")
        return
    queue = snapshot.queues[name] = change.queue
    snapshot.record_event(EventCode.QUEUE_CHANGED, name, f"queue {name}: {describe_quota(queue.quota)}")


def _change_secret(snapshot: MutableSnapshot, change: SetSecret | DeleteSecret) -> None:
    """Record in each live job of the queue whether the secret is missing."""
    for job in list(snapshot.jobs.values()):
        if job.is_ended or job.spec.queue != change.queue or change.name not in job.spec.program.secret_names:
            continue
        missing = set(job.missing_secrets) - {change.name}
        if isinstance(change, DeleteSecret):
            missing.add(change.name)
        if missing != set(job.missing_secrets):
            snapshot.put_job(replace(job, missing_secrets=tuple(sorted(missing))))


def _change_node(
    snapshot: MutableSnapshot, change: AddNode | RemoveNode | CordonNode | UncordonNode | ChangeNode
) -> None:
    name = change.node.name if isinstance(change, AddNode) else change.name
    node = snapshot.nodes.get(name)
    if isinstance(change, AddNode):
        if node is not None or change.node.pool not in snapshot.pools:
            snapshot.refuse(name, f"node {name} already exists, or pool {change.node.pool} does not exist")
            return
        snapshot.nodes[name] = change.node
        snapshot.record_event(
            EventCode.NODE_CHANGED, name, f"node {name} joined pool {change.node.pool} with {change.node.gpus} GPUs"
        )
        return
    if node is None:
        snapshot.refuse(name, f"node {name} does not exist")
        return
    match change:
        case RemoveNode():
            loan = snapshot.loans.get(name)
            held = any(name in job.allocation.held for job in snapshot.jobs.values())
            if held or (loan is not None and loan.is_live):
                snapshot.refuse(name, f"node {name} is lent, or jobs hold its GPUs. Drain it first.")
                return
            del snapshot.nodes[name]
            snapshot.record_event(EventCode.NODE_CHANGED, name, f"node {name} was removed")
        case CordonNode(drain=drain):
            snapshot.nodes[name] = replace(node, cordoned=True, draining=node.draining or drain)
            snapshot.record_event(EventCode.NODE_CHANGED, name, f"node {name} is {'draining' if drain else 'cordoned'}")
        case UncordonNode():
            snapshot.nodes[name] = replace(node, cordoned=False, draining=False, quarantine="", incidents=())
            done = "released from quarantine" if node.quarantine else "uncordoned"
            snapshot.record_event(EventCode.NODE_CHANGED, name, f"node {name} was {done}")
        case ChangeNode():
            _change_lending_of_node(snapshot, node, change)


def _change_lending_of_node(snapshot: MutableSnapshot, node: Node, change: ChangeNode) -> None:
    """Set whether the node can be lent and which GPUs a loan takes, with an event for each that changed."""
    lendable = node.lendable if change.lendable is None else change.lendable
    lendable_gpus = node.lendable_gpus if change.lendable_gpus is None else change.lendable_gpus
    if problem := find_lendable_gpus_problem(lendable_gpus, node.gpus):
        snapshot.refuse(node.name, f"lendable_gpus of node {node.name} must be {problem}, got {list(lendable_gpus)}")
        return
    changed = replace(node, lendable=lendable, lendable_gpus=lendable_gpus)
    if changed != node:
        snapshot.nodes[node.name] = changed
    if lendable is not node.lendable:
        message = f"node {node.name} can {'be lent again' if lendable else 'no longer be lent'}"
        snapshot.record_event(EventCode.NODE_CHANGED, node.name, message)
    if lendable_gpus != node.lendable_gpus:
        part = f"{len(lendable_gpus)} of its {node.gpus} GPUs" if lendable_gpus else "the whole node"
        snapshot.record_event(EventCode.NODE_CHANGED, node.name, f"loans of node {node.name} take {part}")


def _veto_loan(snapshot: MutableSnapshot, veto: VetoLoan, command: Command) -> None:
    """End a proposed loan, and keep its node from being proposed again for a time."""
    loan = next((loan for loan in snapshot.loans.values() if loan.id == veto.loan_id), None)
    if loan is None or loan.state is not LoanState.PROPOSED:
        found = "does not exist or has ended" if loan is None else f"is {loan.state}"
        snapshot.refuse(veto.loan_id, f"loan {veto.loan_id} {found}; only a proposed loan can be vetoed")
        return
    veto_s = snapshot.pools[loan.pool].lending.veto_s
    snapshot.put_loan(loan.transition_to(LoanState.VETOED, snapshot.now_s))
    node = replace(snapshot.nodes[loan.node], vetoed_until_s=snapshot.now_s + veto_s)
    snapshot.nodes[loan.node] = node
    author = command.actor or "an unnamed caller"
    via = f" by webhook {veto.webhook_id}" if veto.webhook_id else ""
    message = f"{author} vetoes{via} the loan of node {loan.node} for {veto_s:.0f} s: {veto.reason}"
    snapshot.record_event(EventCode.LOAN_VETOED, loan.id, message, {"vetoed_until_s": node.vetoed_until_s})


def _apply_switch(
    snapshot: MutableSnapshot, switch: PauseLending | ResumeLending | RecallAll | FreezeResizes, command: Command
) -> None:
    """Apply a switch. Those of lending record their author and time."""
    match switch:
        case PauseLending():
            snapshot.switches = replace(snapshot.switches, lending_paused=True)
        case RecallAll():
            snapshot.switches = replace(snapshot.switches, lending_paused=True, loans_recalled=True)
        case ResumeLending():
            snapshot.switches = Switches(resizes_frozen=snapshot.switches.resizes_frozen)
        case FreezeResizes(frozen=frozen):
            snapshot.switches = replace(snapshot.switches, resizes_frozen=frozen)
    if not isinstance(switch, FreezeResizes):
        snapshot.lending_set_by, snapshot.lending_set_at_s = command.actor, min(command.at_s, snapshot.now_s)
    snapshot.record_event(EventCode.LENDING_SWITCHED, "fleet", type(switch).__name__)


def _record_curve_point(snapshot: MutableSnapshot, solved: CurveSolved) -> None:
    curve = snapshot.curves.get(solved.curve_key, ScalingCurve())
    if solved.plan is not None:
        snapshot.curves[solved.curve_key] = curve.with_plan(solved.shape, solved.plan)
    else:
        snapshot.curves[solved.curve_key] = curve.with_infeasible(solved.shape, solved.infeasible)


def _drop_outdated_curves(snapshot: MutableSnapshot, change: SolverChanged) -> None:
    """Drop what another solver or other hardware has made. Running jobs keep their plans."""
    if change.solver != snapshot.solver:
        if snapshot.curves:
            message = f"the solver is now {change.solver}; {len(snapshot.curves)} curves will be solved again"
            snapshot.record_event(EventCode.CURVES_DROPPED, "solver", message)
        snapshot.curves.clear()
        forget_measurements(snapshot)
    elif change.hardware != snapshot.curve_hardware:
        _drop_gpu_points(snapshot, _find_changed_keys(snapshot.curve_hardware, change.hardware))
    snapshot.solver, snapshot.curve_hardware = change.solver, change.hardware


def _drop_gpu_points(snapshot: MutableSnapshot, gpus: frozenset[str]) -> None:
    """Drop the curve points and the measured steps on these GPU models."""
    reduced = {key: curve.without_gpus(gpus) for key, curve in snapshot.curves.items()}
    changed = [key for key, curve in reduced.items() if curve is not snapshot.curves[key]]
    for key in changed:
        snapshot.curves[key] = reduced[key]
    forget_measurements(snapshot, gpus)
    if changed:
        names = ", ".join(sorted(gpus))
        message = f"the hardware of {names} has changed; {len(changed)} curves will be solved again on these GPUs"
        snapshot.record_event(EventCode.CURVES_DROPPED, "solver", message)


def _find_changed_keys(before: Mapping[str, str], after: Mapping[str, str]) -> frozenset[str]:
    return frozenset(key for key in {*before, *after} if before.get(key) != after.get(key))
