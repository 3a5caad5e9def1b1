"""Commands that bring the state in line with the specs of custom resources.

Level-triggered: only differences from the snapshot become commands. Command ids of a job contain the uid and generation
of its resource, so each change is sent once. Command ids of pools, queues and nodes contain the snapshot generation,
and are not repeated while an equal command is pending. All caches must be complete, because a missing resource counts
as deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scheduler.documents.document import InvalidDocumentError, InvalidField
from scheduler.domain.commands import (
    CancelJob,
    ChangeJob,
    ChangeQueue,
    Command,
    CommandBody,
    CreateQueue,
    ResumeJob,
    ScaleJob,
    SubmitJob,
    SuspendJob,
)
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_labels import find_label_problem, merge_labels
from scheduler.domain.job_queue import JobQueue, describe_existing_queues, find_priority_ceiling, is_existing_queue
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.owner_ids import build_namespace_owner_id, build_namespace_owner_name
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.fleet_commands import FleetCommands, compute_fleet_commands
from scheduler.kubernetes.resources.elastic_job import (
    ElasticJob,
    derive_job_id,
    find_immutable_changes,
    find_job,
    find_label_changes,
    get_applied_generation,
    is_from_api,
    is_managed_by_us,
    parse_elastic_job,
)
from scheduler.kubernetes.resources.elastic_job_status import has_ended_phase
from scheduler.kubernetes.resources.meta import (
    ACCEPTED,
    Condition,
    Metadata,
    Resource,
    find_previous_condition,
    get_mapping,
    parse_metadata,
    parse_time_s,
)
from scheduler.store.protocol import LoadedState

ACTOR = "kubernetes"


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """All custom resources and nodes, as returned by the API server."""

    elastic_jobs: tuple[Resource, ...] = ()
    pools: tuple[Resource, ...] = ()
    queues: tuple[Resource, ...] = ()
    loans: tuple[Resource, ...] = ()
    nodes: tuple[Resource, ...] = ()
    gpu_profiles: tuple[Resource, ...] = ()


@dataclass(frozen=True, slots=True)
class SpecCommands:
    """Commands, and conditions by resource uid.

    `conditions` are absent for ElasticJobs whose spec was validated before. `command_ids` are the commands of each
    resource. `resources` are the resources that were read.
    """

    commands: tuple[Command, ...] = ()
    conditions: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)
    command_ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fleet: FleetCommands = field(default_factory=FleetCommands)
    resources: ClusterResources = ClusterResources()


def compute_spec_commands(
    resources: ClusterResources,
    loaded: LoadedState,
    now_s: float,
    *,
    job_namespace: str,
    allows_undeclared_queues: bool = False,
) -> SpecCommands:
    """Return the commands for all differences, and a condition for each resource that was read.

    Never raises: an invalid spec becomes a condition. The owner of an ElasticJob's job is its namespace, because
    resources do not record their creator. Jobs without a namespace have their resources in `job_namespace`. A new job
    whose queue does not exist waits for it with a condition, unless `allows_undeclared_queues`.
    """
    snapshot = loaded.snapshot
    fleet = compute_fleet_commands(
        resources.pools, resources.queues, resources.nodes, loaded, gpu_profiles=resources.gpu_profiles
    )
    bodies = {f"{name}-{snapshot.generation}": body for name, body in fleet.bodies.items()}
    rules = _QueueRules(_collect_queues(loaded, fleet), allows_undeclared_queues)
    conditions, command_ids = dict(fleet.conditions), dict[str, tuple[str, ...]]()
    submitted_at_s, namespaces = dict[str, float](), dict[str, str]()
    for resource in resources.elastic_jobs:
        if not is_managed_by_us(resource):
            continue
        meta = parse_metadata(resource)
        job_bodies, condition = _job_commands(resource, meta, find_job(meta, snapshot.jobs, job_namespace), rules)
        bodies |= job_bodies
        command_ids[meta.uid] = tuple(job_bodies)
        if condition is not None:
            conditions[meta.uid] = (condition,)
        submitted_at_s[f"submit-{meta.uid}"] = min(now_s, parse_time_s(meta.created_at) or now_s)
        namespaces[f"submit-{meta.uid}"] = meta.namespace
    bodies |= _cancel_missing(resources, snapshot)
    commands = (
        _build_command(name, submitted_at_s.get(name, now_s), body, namespaces.get(name))
        for name, body in bodies.items()
    )
    return SpecCommands(tuple(commands), conditions, command_ids, fleet, resources)


def _build_command(name: str, at_s: float, body: CommandBody, namespace: str | None) -> Command:
    if namespace is None:
        return Command(name, at_s, body, ACTOR)
    owner, owner_id = build_namespace_owner_name(namespace), build_namespace_owner_id(namespace)
    return Command(name, at_s, body, owner, actor_id=owner_id)


@dataclass(frozen=True, slots=True)
class _QueueRules:
    """What a new job must satisfy to be accepted by its queue, one of `queues` unless undeclared ones are allowed."""

    queues: Mapping[str, JobQueue]
    allows_undeclared: bool

    def find_problem(self, spec: JobSpec) -> Condition | None:
        """Return the condition of a job that its queue does not accept. Nobody has a role in a queue here."""
        name = spec.queue
        if not self.allows_undeclared and not is_existing_queue(name, self.queues):
            invalid = InvalidField("queue", name, describe_existing_queues(name, self.queues))
            return Condition(ACCEPTED, False, "QueueNotFound", invalid.message)
        limiting, ceiling = find_priority_ceiling(name, self.queues)
        if spec.priority > ceiling:
            invalid = InvalidField("priority", spec.priority, f"at most {ceiling}, the maxPriority of queue {limiting}")
            return Condition(ACCEPTED, False, "PriorityTooHigh", invalid.message)
        return None


def _collect_queues(loaded: LoadedState, fleet: FleetCommands) -> dict[str, JobQueue]:
    """Return the queues as the next commands leave them, so that a job may be applied with its queue."""
    bodies = (*(command.body for command in loaded.inbox), *fleet.bodies.values())
    changed = [body.queue for body in bodies if isinstance(body, CreateQueue | ChangeQueue)]
    return {**loaded.snapshot.queues, **{queue.name: queue for queue in changed}}


def _job_commands(
    resource: Resource, meta: Metadata, job: Job | None, rules: _QueueRules
) -> tuple[dict[str, CommandBody], Condition | None]:
    """Return the commands of an ElasticJob by id, and the condition if its spec was validated.

    `rules` apply to a new job only.
    """
    if meta.is_deleting:
        return ({f"cancel-{meta.uid}": CancelJob(job.id)} if job is not None and _is_wanted(job) else {}), None
    status = get_mapping(resource, "status")
    if (job is None or job.is_ended) and has_ended_phase(status):
        return {}, None
    if job is None and is_from_api(meta):
        return {}, None
    before = find_previous_condition(status.get("conditions"), ACCEPTED)
    is_accepted = not before or before[0].holds
    if job is not None and is_accepted and get_applied_generation(resource, meta) == meta.generation:
        return _label_commands(meta, job)
    try:
        parsed = parse_elastic_job(resource)
    except InvalidDocumentError as error:
        return {}, Condition(ACCEPTED, False, "Refused", str(error))
    if job is None:
        refusal = rules.find_problem(parsed.spec)
        return ({}, refusal) if refusal is not None else _submission(parsed, meta)
    if changed := find_immutable_changes(parsed.spec, job):
        return {}, _immutable_field_condition(changed)
    label_commands, refusal = _label_commands(meta, job)
    if refusal is not None:
        return {}, refusal
    return {**dict(_job_changes(parsed, job, meta)), **label_commands}, Condition(ACCEPTED, True, "Accepted")


def _submission(parsed: ElasticJob, meta: Metadata) -> tuple[dict[str, CommandBody], Condition]:
    """Return the submission. Its id has no generation, so that a job is submitted once."""
    job_id = derive_job_id(meta)
    bodies: dict[str, CommandBody] = {f"submit-{meta.uid}": SubmitJob(job_id, parsed.spec)}
    if parsed.suspend:
        bodies[f"suspend-{meta.uid}-{meta.generation}"] = SuspendJob(job_id)
    return bodies, Condition(ACCEPTED, True, "Accepted")


def _job_changes(parsed: ElasticJob, job: Job, meta: Metadata) -> Iterator[tuple[str, CommandBody]]:
    if not _is_wanted(job):
        return
    command_ids, version = parsed.spec, f"{meta.uid}-{meta.generation}"
    if (command_ids.min_gpus, command_ids.max_gpus) != (job.spec.min_gpus, job.spec.max_gpus):
        yield f"scale-{version}", ScaleJob(job.id, command_ids.min_gpus, command_ids.max_gpus)
    if parsed.suspend and job.intent is Intent.RUN:
        yield f"suspend-{version}", SuspendJob(job.id)
    if not parsed.suspend and job.intent is Intent.SUSPEND:
        yield f"resume-{version}", ResumeJob(job.id)


def _label_commands(meta: Metadata, job: Job) -> tuple[dict[str, CommandBody], Condition | None]:
    """Return the command that follows changed labels of the resource, or the condition that refuses them.

    Labels are metadata, so that a change of them leaves the generation as it is.
    """
    changes = find_label_changes(meta, job) if _is_wanted(job) else {}
    if not changes:
        return {}, None
    if problem := find_label_problem(merge_labels(job.spec.labels, changes)):
        field = f"metadata.labels.{problem.key}" if problem.key else "metadata.labels"
        return {}, Condition(ACCEPTED, False, "Refused", InvalidField(field, problem.value, problem.allowed).message)
    return {f"labels-{meta.uid}-{meta.resource_version}": ChangeJob(job.id, labels=changes)}, None


def _immutable_field_condition(names: tuple[str, ...]) -> Condition:
    message = f"{', '.join(names)}: immutable after submission; the job keeps its values"
    return Condition(ACCEPTED, False, "FixedFieldChanged", message)


def _cancel_missing(resources: ClusterResources, snapshot: Snapshot) -> dict[str, CommandBody]:
    """Cancel jobs whose resource disappeared despite its finalizer."""
    uids = {parse_metadata(resource).uid for resource in resources.elastic_jobs}
    jobs = (job for job in snapshot.jobs.values() if job.spec.resource_uid and _is_wanted(job))
    return {f"cancel-{job.spec.resource_uid}": CancelJob(job.id) for job in jobs if job.spec.resource_uid not in uids}


def _is_wanted(job: Job) -> bool:
    return not job.is_ended and job.intent is not Intent.CANCEL
