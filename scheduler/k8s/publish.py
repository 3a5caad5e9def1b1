"""publish: what the snapshot says, as steps that make the custom resources say the same.

Nothing is remembered between two calls: what was written, and when, stands in the resources themselves. Jobs that were
asked for over HTTP get ElasticJobs; where a job was changed over HTTP its ElasticJob follows, unless it was changed
itself and that is still on its way into the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from scheduler.domain.job import Intent, Job
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.intake import Resources
from scheduler.k8s.kinds import ELASTIC_JOB, FROM_API, JOB_FINALIZER, JOB_LABEL, MANAGED_BY_LABEL, ORIGIN_ANNOTATION
from scheduler.k8s.publish_fleet import publish_loans, publish_pools, publish_queues
from scheduler.k8s.resources.conditions import ACCEPTED, Claim, claimed_before
from scheduler.k8s.resources.elastic_job import (
    elastic_job_spec,
    is_from_api,
    is_managed_by_us,
    job_id_of,
    job_of,
    taken_generation,
)
from scheduler.k8s.resources.elastic_job_status import REFUSED, has_ended, job_status, refused_status, stamped
from scheduler.k8s.resources.metadata import Metadata, Resource, metadata, part
from scheduler.k8s.steps import Create, Delete, Steps, patched, status_patched
from scheduler.k8s.writing import World, keep, let_go, status_steps


def publish(world: World) -> tuple[Steps, ...]:
    """What has to be written, object by object; nothing where all resources say what is.

    Raises:
        FencedError: a later leader has written a Pool, a Queue or a Loan.
    """
    jobs = (_publish_job(each, world) for each in world.resources.elastic_jobs if is_managed_by_us(each))
    fleet = (*publish_pools(world), *publish_queues(world), *publish_loans(world))
    return tuple(steps for steps in (*jobs, *_new_resources(world), *fleet) if steps)


def unknown_jobs(resources: Resources, snapshot: Snapshot) -> tuple[str, ...]:
    """Ids of jobs that are not in the snapshot and whose resources do not say yet how they ended."""
    ids = []
    for resource in resources.elastic_jobs:
        status = part(resource, "status")
        is_told = status.get("phase") == REFUSED or has_ended(status)
        job_id = job_id_of(metadata(resource))
        if not is_told and is_managed_by_us(resource) and job_id not in snapshot.jobs:
            ids.append(job_id)
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class _Subject:
    """An ElasticJob and its job. `claims` are those of this time's reading, empty where its spec was not read."""

    resource: Resource
    meta: Metadata
    job: Job | None
    claims: tuple[Claim, ...]

    @property
    def is_refused(self) -> bool:
        claims = self.claims or claimed_before(part(self.resource, "status").get("conditions"), ACCEPTED)
        return any(not claim.holds for claim in claims)


def _publish_job(resource: Resource, world: World) -> Steps:
    """Whatever epoch it bears: that is no proof of a later leader, because the annotations of an ElasticJob are its
    user's to write, and because a database that was restored begins with earlier epochs."""
    meta = metadata(resource)
    job_id = job_id_of(meta)
    lives = job_of(meta, world.snapshot.jobs, world.job_namespace)
    job = lives or job_of(meta, world.ended_jobs, world.job_namespace)
    subject = _Subject(resource, meta, job, world.taken.claims.get(meta.uid, ()))
    if meta.is_deleting and _has_left(job, (meta.namespace, job_id), world):
        return let_go(ELASTIC_JOB, meta, JOB_FINALIZER)
    if job is None:
        return _without_job(subject, world)
    kept = keep(ELASTIC_JOB, meta, JOB_FINALIZER, world.stamp, labels={JOB_LABEL: job.id})
    if job.is_ended and _is_over(subject, world):
        return _deleted(meta)
    if kept:
        return kept
    observed, following = _follow(subject, job, world)
    status = _status(job, part(resource, "status"), subject, observed, world)
    return (*following, *status_steps(ELASTIC_JOB, resource, status, world))


def _without_job(subject: _Subject, world: World) -> Steps:
    """Refused, or on its way into the store, or long ended."""
    resource, meta = subject.resource, subject.meta
    before = part(resource, "status")
    if _is_over(subject, world):
        return _deleted(meta)
    claims = (_no_such_job(meta),) if is_from_api(meta) and not has_ended(before) else subject.claims
    if any(not claim.holds for claim in claims):
        refused = refused_status(claims)
        status = stamped(refused, meta, before=before, observed=meta.generation, now_s=world.now_s)
        return status_steps(ELASTIC_JOB, resource, status, world)
    if not claims:
        return ()
    return keep(ELASTIC_JOB, meta, JOB_FINALIZER, world.stamp, labels={JOB_LABEL: job_id_of(meta)})


def _no_such_job(meta: Metadata) -> Claim:
    why = f"Ebbtide made this for its job {meta.name}, which does not exist here; create one without the annotations"
    return Claim(ACCEPTED, False, "NoSuchJob", why)


def _follow(subject: _Subject, job: Job, world: World) -> tuple[int, Steps]:
    """The generation of the spec that is taken in, and what makes the spec follow a job that was changed elsewhere.

    The server counts the generation up by one with our change; that one is taken in as well, so that it is not taken
    for the wish of the resource's owner.
    """
    meta, asked = subject.meta, world.taken.asked.get(subject.meta.uid, ())
    observed = taken_generation(subject.resource, meta)
    if subject.claims and (subject.is_refused or all(command in world.settled for command in asked)):
        observed = meta.generation
    spec, wanted = part(subject.resource, "spec"), elastic_job_spec(job)
    is_same = spec.get("gpus") == wanted["gpus"] and spec.get("suspend", False) == wanted["suspend"]
    is_settled = job.is_ended or job.intent is Intent.CANCEL or meta.is_deleting or subject.is_refused
    if is_same or is_settled or observed != meta.generation:
        return observed, ()
    body = {
        "metadata": {"annotations": world.stamp},
        "spec": {"gpus": wanted["gpus"], "suspend": wanted["suspend"]},
    }
    return meta.generation + 1, (patched(ELASTIC_JOB, meta, body),)


def _status(job: Job, before: Any, subject: _Subject, observed: int, world: World) -> dict[str, Any]:
    waiting = world.waiting.get(job.id)
    status = job_status(job, waiting, world.snapshot, before=before, accepted=subject.claims)
    return stamped(status, subject.meta, before=before, observed=observed, now_s=world.now_s)


def _has_left(job: Job | None, place: tuple[str, str], world: World) -> bool:
    held = job is not None and (not job.is_ended or job.allocation.held_gpus > 0)
    return not held and place not in world.podded


def _is_over(subject: _Subject, world: World) -> bool:
    """A job from HTTP that has ended long ago. Resources that users wrote are theirs to delete."""
    status = part(subject.resource, "status")
    ended = has_ended(status) and world.is_older(status.get("endedAt"), world.retention.jobs_s)
    return ended and is_from_api(subject.meta) and not subject.meta.is_deleting


def _deleted(meta: Metadata) -> Steps:
    return (Delete(ELASTIC_JOB, meta.namespace, meta.name, meta.uid),)


def _new_resources(world: World) -> Iterator[Steps]:
    """ElasticJobs for jobs from HTTP that have none."""
    metas = (metadata(resource) for resource in world.resources.elastic_jobs)
    present = {(meta.namespace, meta.name) for meta in metas}
    for job in _from_api(world.snapshot):
        namespace = job.spec.namespace or world.job_namespace
        if (namespace, job.id) in present:
            continue
        body = _resource(job, namespace, world.stamp)
        meta = metadata(body)
        status = _status(job, {}, _Subject(body, meta, job, ()), 1, world)
        yield Create(ELASTIC_JOB, body), status_patched(ELASTIC_JOB, meta, status)


def _from_api(snapshot: Snapshot) -> Iterable[Job]:
    return (job for job in snapshot.jobs.values() if not job.spec.resource_uid and not job.is_ended)


def _resource(job: Job, namespace: str, stamp: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": ELASTIC_JOB.api_version,
        "kind": ELASTIC_JOB.name,
        "metadata": {
            "name": job.id,
            "namespace": namespace,
            "labels": {JOB_LABEL: job.id, MANAGED_BY_LABEL: "ebbtide"},
            "annotations": {**stamp, ORIGIN_ANNOTATION: FROM_API},
            "finalizers": [JOB_FINALIZER],
        },
        "spec": elastic_job_spec(job),
    }
