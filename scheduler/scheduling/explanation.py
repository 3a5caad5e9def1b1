"""Explain why a job runs or waits, with numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.gpu_sets import GpuShape, canonical_gpu_counts
from scheduler.domain.job import Job
from scheduler.domain.job_account import RunFailure
from scheduler.domain.job_state import JobState
from scheduler.domain.learned_constants import describe_constants
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.suggestions import suggest
from scheduler.scheduling.policies.speed import describe_speeds, gpu_model, node_sizes, packed
from scheduler.scheduling.quarantine import find_straggler_incident
from scheduler.scheduling.queue_outlook import QueueOutlook
from scheduler.scheduling.step_learning import predict_step_factor

_QUOTA_CODES = (
    ReasonCode.WAITING_FOR_QUOTA,
    ReasonCode.EXCEEDS_MAX_QUOTA,
    ReasonCode.WAITING_FOR_USER_LIMIT,
    ReasonCode.EXCEEDS_USER_LIMIT,
    ReasonCode.HELD_BY_MINIMUM_RUNTIME,
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job runs or waits.

    Attributes:
        reason: Why the job waits; None if it does not wait.
        position: Place in the queue, from 1, or None.
        needed_gpus: GPUs that the job starts on according to its reason, else its minimum.
        free_gpus: GPUs that were free at the job's turn, else GPUs that are free now.
        holders: Other jobs and how many GPUs they hold that this job could use, the most first.
        expected_start_s: When the GPUs missing for this job and those before it come free, if running jobs end as
            predicted and no job passes. None if that is unknown.
        unblocks: What would start the job.
        failure: The last run that failed, or None.
    """

    job_id: str
    state: JobState
    summary: str
    reason: Reason | None
    position: int | None
    needed_gpus: int
    held_gpus: int
    free_gpus: int
    holders: Mapping[str, int]
    expected_start_s: float | None
    unblocks: str
    failure: RunFailure | None = None


def explain(
    snapshot: Snapshot, waiting: Mapping[str, Reason], job_id: str, outlook: QueueOutlook | None = None
) -> Explanation:
    """Explain the state of a job.

    Args:
        waiting: from the tick that made `snapshot`.
        outlook: facts about both that several explanations share.

    Raises:
        KeyError: The snapshot has no such job.
    """
    job = snapshot.jobs[job_id]
    outlook = outlook or QueueOutlook(snapshot, waiting)
    reason = waiting.get(job_id) if not job.is_placed and not job.is_ended else None
    numbers = reason.numbers if reason else {}
    needed = int(numbers.get("needed_gpus", job.spec.min_gpus))
    free = int(numbers.get("free_gpus", snapshot.index.free_gpu_total))
    missing = int(numbers.get("missing_gpus", max(0, needed - free))) if job.state is JobState.QUEUED else 0
    return Explanation(
        job_id=job_id,
        state=job.state,
        summary=_summarize(job, reason, snapshot.now_s)
        + _describe_progress(job)
        + _describe_resize_mode(job)
        + _describe_scaling_limit(snapshot, job)
        + _describe_unlike_nodes(snapshot, job)
        + _describe_gpu_speeds(snapshot, job)
        + _describe_step_time(snapshot, job)
        + _describe_stragglers(snapshot, job)
        + _suggest_queue(snapshot, job),
        reason=reason,
        position=_position(reason),
        needed_gpus=needed,
        held_gpus=job.allocation.held_gpus,
        free_gpus=free,
        holders=outlook.list_holders(job),
        expected_start_s=_estimate_start_s(outlook, job, missing),
        unblocks=_describe_unblocking(job, reason, needed, missing),
        failure=job.failure,
    )


def explain_ended(job: Job) -> Explanation:
    """Explain the state of a job that is no longer in the snapshot."""
    summary = job.message or str(job.state)
    held = job.allocation.held_gpus
    return Explanation(job.id, job.state, summary, None, None, 0, held, 0, {}, None, "", job.failure)


def _position(reason: Reason | None) -> int | None:
    position = reason.numbers.get("position") if reason else None
    return None if position is None else int(position)


def _summarize(job: Job, reason: Reason | None, now_s: float) -> str:
    if job.is_placed:
        plan = job.allocation.plan
        plan_text = f" as {plan.summarize()}" if plan else ""
        held = gpu_sets.format_gpu_count(job.allocation.target_gpus)
        where = f"{held}, {gpu_sets.format_gpus(job.allocation.target)}"
        return f"{job.state} on {where}{plan_text}{_describe_setup(job, now_s)}"
    if reason is not None:
        return f"{job.state}: {reason.detail}"
    return f"{job.state}: {job.message}" if job.message else str(job.state)


def _describe_setup(job: Job, now_s: float) -> str:
    """Say how long a job with a setup command has been starting, and where the command runs."""
    if job.state not in (JobState.STARTING, JobState.RESIZING) or not job.spec.program.setup:
        return ""
    return f" for {now_s - job.state_since_s:.0f} s: {job.message}" if job.message else ""


def _describe_progress(job: Job) -> str:
    """Say what of the job's progress is not known, and that it restarted from step 0. Empty if neither applies."""
    account, text = job.account, ""
    if not job.has_known_steps:
        text = "; it has not reported progress, so steps and remaining time are estimates"
    if account.lost_gpu_s and not job.progress.checkpoint_steps:
        began = "restarted" if job.is_placed else "restarts"
        text += f"; it {began} from step 0, and {account.lost_gpu_s / 3600.0:.2f} GPU-hours of work were lost"
    return text


def _describe_resize_mode(job: Job) -> str:
    """Say why an elastic job keeps its number of GPUs. Empty if it can be resized."""
    if job.is_resizable or not job.spec.is_elastic:
        return ""
    if job.lacks_session:
        return "; it is not resized: it declares checkpoints, but its script has opened no session of ebbtide"
    why = "onResize is never" if job.spec.on_resize else "it declares no checkpoints and has not reported progress"
    return f"; it is not resized after its start: {why}"


def _suggest_queue(snapshot: Snapshot, job: Job) -> str:
    """Point out an undeclared queue whose name is similar to that of a declared one, as it may be misspelled."""
    queue, queues = job.spec.queue, snapshot.queues
    if queue in queues or job.is_ended or not (near := suggest(queue, queues)):
        return ""
    return f"; queue {queue!r} is not declared{near}"


def _describe_scaling_limit(snapshot: Snapshot, job: Job) -> str:
    """Say why the next larger number of GPUs would not make the job faster. Empty if it would, or if unknown."""
    sizes, current = node_sizes(snapshot), job.allocation.target_gpus
    gpu = gpu_model(snapshot, job, sizes)
    if not job.is_placed or gpu is None or current >= job.spec.max_gpus or not job.is_resizable:
        return ""
    curve = snapshot.curve(job)
    for count in canonical_gpu_counts(current + 1, job.spec.max_gpus, sizes[gpu]):
        shape = packed(gpu, count, sizes[gpu])
        plan, part = curve.plan_for(shape), curve.faster_subset(shape, job.spec.min_gpus)
        better = curve.plan_for(part) if part else None
        if plan and part and better:
            speed = "no faster" if plan.iteration_time_s == better.iteration_time_s else "slower"
            return f"; {count} GPUs would be {speed} than {part.gpus}"
    return ""


def _describe_gpu_speeds(snapshot: Snapshot, job: Job) -> str:
    speeds = describe_speeds(snapshot, job)
    return f"; relative speed of a GPU: {speeds}" if speeds else ""


def _describe_step_time(snapshot: Snapshot, job: Job) -> str:
    """Say how long a step takes, and how long one should take after what other jobs have measured."""
    plan, factor = job.allocation.plan, predict_step_factor(snapshot, job)
    if factor is None or plan is None or job.state is not JobState.RUNNING or not job.has_reported:
        return ""
    low_s, high_s = (plan.profile_time_s * bound for bound in factor.interval)
    predicted_s = plan.profile_time_s * factor.mean
    expected = f"predicted {predicted_s:.3g} s, {low_s:.3g} to {high_s:.3g} s in 80% of cases"
    constants = job.constants.plan
    learned = f"; its plan is for hardware as measured: {describe_constants(constants)}" if constants else ""
    return f"; a step takes {job.step_time_s():.3g} s ({expected}){learned}"


def _describe_stragglers(snapshot: Snapshot, job: Job) -> str:
    nodes = [node for name in job.allocation.target if (node := snapshot.nodes.get(name)) is not None]
    slow = [incident.detail for node in nodes if (incident := find_straggler_incident(node, job)) is not None]
    return "".join(f"; {detail}" for detail in slow)


def _describe_unlike_nodes(snapshot: Snapshot, job: Job) -> str:
    """Say why a job that could grow does not use free whole nodes of a GPU model that it does not hold."""
    sizes = node_sizes(snapshot)
    held = {snapshot.nodes[name].gpu for name in job.allocation.target if name in snapshot.nodes}
    if not held or job.allocation.target_gpus >= job.spec.max_gpus or not job.is_resizable:
        return ""
    free = Counter(
        room.gpu
        for room in snapshot.index.free_by_node.values()
        if room.gpu not in held
        and len(room.indices) == sizes[room.gpu]
        and (job.accepts_lent_nodes or not room.is_lent)
    )
    if not free:
        return ""
    gpu, nodes = min(free.items(), key=lambda item: (-item[1], item[0]))
    reason = _explain_no_mix(snapshot, job, gpu)
    return f"; {nodes} free {'node' if nodes == 1 else 'nodes'} of {gpu} not used: {reason}"


def _explain_no_mix(snapshot: Snapshot, job: Job, gpu: str) -> str:
    if job.spec.gpu:
        return f"the job requires {job.spec.gpu}"
    if not job.spec.has_profile:
        return "without a model, the speed of a mix is unknown"
    if not job.spec.mixes_gpu_models:
        return "gpus.mix is never"
    curve, now_s = snapshot.profile_curve(job), job.step_time_s()
    counts = [(snapshot.nodes[name].gpu, len(indices)) for name, indices in job.allocation.target.items()]
    unlike = (gpu, node_sizes(snapshot)[gpu])
    shapes = (GpuShape.from_node_counts([*counts, *[unlike] * nodes]) for nodes in (1, 2, 3, 4))
    solved = [plan.iteration_time_s * job.curve_correction for shape in shapes if (plan := curve.plan_for(shape))]
    if not solved:
        return "no plan for such a mix is solved"
    gain = "" if min(solved) >= now_s else "; the next full pass weighs this against the price of the move"
    known = "" if job.has_reported else " (estimated)"
    return f"a step would take {min(solved):.3g} s, now {now_s:.3g} s{known}{gain}"


def _estimate_start_s(outlook: QueueOutlook, job: Job, missing: int) -> float | None:
    """Estimate when the job starts, or return None if that is unknown.

    A job that waits for a quota starts when the protection by minimum run times ends, if that is the cause. A job that
    must not delay the head of the queue starts once there are GPUs for all jobs before it and for itself.
    """
    reason = outlook.waiting.get(job.id)
    if reason is not None and reason.code in _QUOTA_CODES:
        return reason.numbers.get("held_until_s")
    if job.state is not JobState.QUEUED:
        return None
    if reason is not None and reason.code is ReasonCode.BEHIND_HEAD_OF_QUEUE and "position" in reason.numbers:
        missing = int(reason.numbers["needed_gpus"] - reason.numbers["free_gpus"])  # below 0 where it alone would fit
    elif reason is not None and not missing:
        return None
    missing += outlook.count_gpus_needed_before(job)
    at_s = outlook.snapshot.now_s
    for end_s, gpus in outlook.list_expected_releases(job):
        if missing <= 0:
            break
        missing, at_s = missing - gpus, end_s
    return at_s if missing <= 0 else None


def _describe_unblocking(job: Job, reason: Reason | None, needed: int, missing: int) -> str:
    if reason is None:
        return ""
    match reason.code:
        case ReasonCode.WAITING_FOR_PLAN:
            return "the solver returning a plan for its shape"
        case ReasonCode.SECRET_MISSING:
            return f"setting the secrets again, or restoring their master key: {', '.join(job.missing_secrets)}"
        case ReasonCode.BACKING_OFF:
            return "the end of its backoff"
        case ReasonCode.SUSPENDED:
            return "a resume by its owner"
        case ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS:
            return "the release of the GPUs that running jobs give up for it"
        case ReasonCode.TOPOLOGY_PLACEMENT_FAILED:
            return "free GPUs on fewer nodes, or another range of GPUs"
        case ReasonCode.NO_MATCHING_FLAVOR:
            return f"{gpu_sets.format_gpu_count(needed)} free, of a kind that it can use"
        case ReasonCode.WAITING_FOR_QUOTA:
            return f"the end of other jobs in queue {job.spec.queue}, or a higher limit for the queue"
        case ReasonCode.EXCEEDS_MAX_QUOTA:
            least = gpu_sets.format_gpu_count(job.spec.min_gpus)
            return f"a limit of at least {least} for queue {job.spec.queue}, or a smaller `gpus.min`"
        case ReasonCode.WAITING_FOR_USER_LIMIT:
            owner = job.owner or "its owner"
            return f"the end of other jobs of {owner} in queue {job.spec.queue}, or a higher user limit for the queue"
        case ReasonCode.EXCEEDS_USER_LIMIT:
            least = gpu_sets.format_gpu_count(job.spec.min_gpus)
            return f"a user limit of at least {least} for queue {job.spec.queue}, or a smaller `gpus.min`"
        case ReasonCode.HELD_BY_MINIMUM_RUNTIME:
            return f"the end of the minimum run time of the jobs that borrow GPUs of queue {job.spec.queue}"
        case ReasonCode.BEHIND_HEAD_OF_QUEUE:
            return "the start of the job at the head of the queue"
    if not missing:
        return "the start of the jobs before it"
    beyond = " beyond those that the jobs before it take" if (_position(reason) or 1) > 1 else ""
    smaller = ", or a smaller `gpus.min`" if needed == job.spec.min_gpus else ""
    return f"{missing} more free GPU{'s' if missing > 1 else ''}{beyond}{smaller}"
