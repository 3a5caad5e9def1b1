"""intake: what custom resources and nodes of the cluster ask for, as commands for the inbox.

Level-triggered: what differs from the snapshot is said, what is the same is not. Commands for a job bear the uid and
the generation of its resource, so that each change of a resource is passed on once, however often it is seen; those for
pools, queues and nodes bear the generation of the snapshot that they differ from, and are not repeated while one waits.
Nobody has to be asked: all mirrors have to be complete, because a resource that is missing counts as deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scheduler.documents.refusal import RefusedError
from scheduler.domain.command import CancelJob, Command, CommandBody, ResumeJob, ScaleJob, SubmitJob, SuspendJob
from scheduler.domain.job import Intent, Job
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.fleet_intake import FleetIntake, take_in_fleet
from scheduler.k8s.resources.conditions import ACCEPTED, Claim, claimed_before
from scheduler.k8s.resources.elastic_job import (
    ElasticJob,
    fixed_fields_changed,
    is_from_api,
    is_managed_by_us,
    job_id_of,
    job_of,
    read_elastic_job,
    taken_generation,
)
from scheduler.k8s.resources.elastic_job_status import has_ended
from scheduler.k8s.resources.metadata import Metadata, Resource, metadata, part, time_s
from scheduler.store.protocol import Loaded

ACTOR = "kubernetes"


@dataclass(frozen=True, slots=True)
class Resources:
    """All objects of the cluster that are read here, as the API server gives them."""

    elastic_jobs: tuple[Resource, ...] = ()
    pools: tuple[Resource, ...] = ()
    queues: tuple[Resource, ...] = ()
    loans: tuple[Resource, ...] = ()
    nodes: tuple[Resource, ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """What the resources ask for. By the uid of a resource: `claims` are verdicts on its spec, absent for an ElasticJob
    whose spec is the one that was judged before; `asked` are the commands that it led to. `fleet` says how pools were
    read. `resources` are those that were read: what is told of them later must not be told of others."""

    commands: tuple[Command, ...] = ()
    claims: Mapping[str, tuple[Claim, ...]] = field(default_factory=dict)
    asked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fleet: FleetIntake = field(default_factory=FleetIntake)
    resources: Resources = Resources()


def take_in(resources: Resources, loaded: Loaded, now_s: float, *, job_namespace: str) -> Taken:
    """Commands for what differs, and a verdict for each resource that was read. Whatever a spec holds, nothing is
    raised: what cannot be taken in is a claim that does not hold. The owner of an ElasticJob's job is its namespace,
    because no resource tells who made it. Jobs from HTTP that name no namespace have their
    resources in `job_namespace`."""
    snapshot = loaded.snapshot
    fleet = take_in_fleet(resources.pools, resources.queues, resources.nodes, loaded)
    bodies = {f"{name}-{snapshot.generation}": body for name, body in fleet.bodies.items()}
    claims, asked = dict(fleet.claims), dict[str, tuple[str, ...]]()
    submitted_at_s, owners = dict[str, float](), dict[str, str]()
    for resource in resources.elastic_jobs:
        if not is_managed_by_us(resource):
            continue
        meta = metadata(resource)
        wishes, verdict = _job(resource, meta, job_of(meta, snapshot.jobs, job_namespace))
        bodies |= wishes
        asked[meta.uid] = tuple(wishes)
        if verdict is not None:
            claims[meta.uid] = (verdict,)
        submitted_at_s[f"submit-{meta.uid}"] = min(now_s, time_s(meta.created_at) or now_s)
        owners[f"submit-{meta.uid}"] = f"namespace/{meta.namespace}"
    bodies |= _gone(resources, snapshot)
    commands = (
        Command(name, submitted_at_s.get(name, now_s), body, owners.get(name, ACTOR)) for name, body in bodies.items()
    )
    return Taken(tuple(commands), claims, asked, fleet, resources)


def _job(resource: Resource, meta: Metadata, job: Job | None) -> tuple[dict[str, CommandBody], Claim | None]:
    """What an ElasticJob asks for by command id, and the verdict on its spec if that had to be read."""
    if meta.is_deleting:
        return ({f"cancel-{meta.uid}": CancelJob(job.id)} if job is not None and _is_wanted(job) else {}), None
    status = part(resource, "status")
    if (job is None or job.is_ended) and has_ended(status):
        return {}, None
    if job is None and is_from_api(meta):
        return {}, None
    before = claimed_before(status.get("conditions"), ACCEPTED)
    is_accepted = not before or before[0].holds
    if job is not None and is_accepted and taken_generation(resource, meta) == meta.generation:
        return {}, None
    try:
        wanted = read_elastic_job(resource)
    except RefusedError as refused:
        return {}, Claim(ACCEPTED, False, "Refused", str(refused))
    if job is None:
        return _submit(wanted, meta)
    if changed := fixed_fields_changed(wanted.spec, job):
        return {}, _fixed(changed)
    return dict(_changes(wanted, job, meta)), Claim(ACCEPTED, True, "Accepted")


def _submit(wanted: ElasticJob, meta: Metadata) -> tuple[dict[str, CommandBody], Claim]:
    """Submitted once and never again, whatever becomes of the resource: the id holds no generation."""
    job_id = job_id_of(meta)
    bodies: dict[str, CommandBody] = {f"submit-{meta.uid}": SubmitJob(job_id, wanted.spec)}
    if wanted.suspend:
        bodies[f"suspend-{meta.uid}-{meta.generation}"] = SuspendJob(job_id)
    return bodies, Claim(ACCEPTED, True, "Accepted")


def _changes(wanted: ElasticJob, job: Job, meta: Metadata) -> Iterator[tuple[str, CommandBody]]:
    if not _is_wanted(job):
        return
    asked, version = wanted.spec, f"{meta.uid}-{meta.generation}"
    if (asked.min_gpus, asked.max_gpus) != (job.spec.min_gpus, job.spec.max_gpus):
        yield f"scale-{version}", ScaleJob(job.id, asked.min_gpus, asked.max_gpus)
    if wanted.suspend and job.intent is Intent.RUN:
        yield f"suspend-{version}", SuspendJob(job.id)
    if not wanted.suspend and job.intent is Intent.SUSPEND:
        yield f"resume-{version}", ResumeJob(job.id)


def _fixed(names: tuple[str, ...]) -> Claim:
    why = f"{', '.join(names)}: fixed once the job is submitted; it runs on as it was"
    return Claim(ACCEPTED, False, "FixedFieldChanged", why)


def _gone(resources: Resources, snapshot: Snapshot) -> dict[str, CommandBody]:
    """Jobs whose resource is not there any more, though its finalizer should have kept it."""
    present = {metadata(resource).uid for resource in resources.elastic_jobs}
    jobs = (job for job in snapshot.jobs.values() if job.spec.resource_uid and _is_wanted(job))
    return {
        f"cancel-{job.spec.resource_uid}": CancelJob(job.id) for job in jobs if job.spec.resource_uid not in present
    }


def _is_wanted(job: Job) -> bool:
    return not job.is_ended and job.intent is not Intent.CANCEL
