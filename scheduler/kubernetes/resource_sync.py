"""Writes that make custom resources match the snapshot: ElasticJobs, Pools, Queues, GpuProfiles and Loans.

Stateless: the resources themselves record the writes and their times. Jobs submitted over HTTP get ElasticJobs. A job
changed over HTTP changes its ElasticJob, unless the ElasticJob has a newer change that is not applied yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.job import Intent, Job
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import (
    ELASTIC_JOB,
    GPU_PROFILE,
    GPU_PROFILE_FINALIZER,
    JOB_FINALIZER,
    JOB_LABEL,
    LABELS_ANNOTATION,
    LOAN,
    MANAGED_BY_EBBTIDE,
    MANAGED_BY_LABEL,
    ORIGIN_ANNOTATION,
    ORIGIN_API,
    POOL,
    POOL_FINALIZER,
    QUEUE,
    QUEUE_FINALIZER,
    ResourceKind,
)
from scheduler.kubernetes.resource_writes import (
    Create,
    Delete,
    PublishState,
    Writes,
    add_finalizer,
    build_patch,
    build_status_patch,
    build_status_writes,
    remove_finalizer,
)
from scheduler.kubernetes.resources.elastic_job import (
    build_elastic_job_spec,
    build_label_metadata,
    derive_job_id,
    find_job,
    find_label_changes,
    format_common_labels,
    get_applied_generation,
    is_from_api,
    is_managed_by_us,
)
from scheduler.kubernetes.resources.elastic_job_status import (
    REFUSED,
    build_job_status,
    build_refused_status,
    complete_status,
    has_ended_phase,
)
from scheduler.kubernetes.resources.fleet import build_loan, build_loan_status, build_pool_status, build_queue_status
from scheduler.kubernetes.resources.gpu_profile import build_gpu_profile_status
from scheduler.kubernetes.resources.meta import (
    ACCEPTED,
    Condition,
    Metadata,
    Resource,
    find_previous_condition,
    get_mapping,
    parse_metadata,
)
from scheduler.kubernetes.spec_commands import ClusterResources
from scheduler.scheduling.policies.quota import compute_queue_usage


def compute_resource_writes(state: PublishState) -> tuple[Writes, ...]:
    """Return the required writes, grouped by object.

    Raises:
        FencedError: a newer leader has written a Pool, Queue, GpuProfile or Loan.
    """
    jobs = (_build_job_writes(each, state) for each in state.resources.elastic_jobs if is_managed_by_us(each))
    fleet = (*compute_pool_writes(state), *compute_queue_writes(state), *compute_gpu_profile_writes(state))
    others = (*_build_missing_resources(state), *fleet, *compute_loan_writes(state))
    return tuple(steps for steps in (*jobs, *others) if steps)


def find_unreported_jobs(resources: ClusterResources, snapshot: Snapshot) -> tuple[str, ...]:
    """Return ids of jobs that have left the snapshot and whose resources do not report an outcome yet."""
    ids = []
    for resource in resources.elastic_jobs:
        status = get_mapping(resource, "status")
        is_told = status.get("phase") == REFUSED or has_ended_phase(status)
        job_id = derive_job_id(parse_metadata(resource))
        if not is_told and is_managed_by_us(resource) and job_id not in snapshot.jobs:
            ids.append(job_id)
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class _JobResource:
    """An ElasticJob and its job. `conditions` are empty if the spec was not read this time."""

    resource: Resource
    meta: Metadata
    job: Job | None
    conditions: tuple[Condition, ...]

    @property
    def is_rejected(self) -> bool:
        conditions = self.conditions or find_previous_condition(
            get_mapping(self.resource, "status").get("conditions"), ACCEPTED
        )
        return any(not condition.holds for condition in conditions)


def _build_job_writes(resource: Resource, state: PublishState) -> Writes:
    """Return the writes for one ElasticJob.

    Its epoch annotation is not checked: users can edit it, and a restored database restarts with earlier epochs.
    """
    meta = parse_metadata(resource)
    job_id = derive_job_id(meta)
    live_job = find_job(meta, state.snapshot.jobs, state.job_namespace)
    job = live_job or find_job(meta, state.ended_jobs, state.job_namespace)
    job_resource = _JobResource(resource, meta, job, state.spec_commands.conditions.get(meta.uid, ()))
    if meta.is_deleting and _has_released_resources(job, (meta.namespace, job_id), state):
        return remove_finalizer(ELASTIC_JOB, meta, JOB_FINALIZER)
    if job is None:
        return _build_writes_without_job(job_resource, state)
    finalizer_writes = add_finalizer(
        ELASTIC_JOB, meta, JOB_FINALIZER, state.epoch_annotations, labels={JOB_LABEL: job.id}
    )
    if job.is_ended and _is_expired(job_resource, state):
        return _build_delete(meta)
    if finalizer_writes:
        return finalizer_writes
    observed, spec_writes = _follow_job(job_resource, job, state)
    status = _build_status(job, get_mapping(resource, "status"), job_resource, observed, state)
    return (*spec_writes, *build_status_writes(ELASTIC_JOB, resource, status, state))


def _build_writes_without_job(job_resource: _JobResource, state: PublishState) -> Writes:
    """Return the writes for an ElasticJob that is rejected, not submitted yet, or ended long ago."""
    resource, meta = job_resource.resource, job_resource.meta
    current = get_mapping(resource, "status")
    if _is_expired(job_resource, state):
        return _build_delete(meta)
    conditions = (
        (_no_such_job_condition(meta),)
        if is_from_api(meta) and not has_ended_phase(current)
        else job_resource.conditions
    )
    if any(not condition.holds for condition in conditions):
        refused = build_refused_status(conditions)
        status = complete_status(refused, meta, before=current, observed_generation=meta.generation, now_s=state.now_s)
        return build_status_writes(ELASTIC_JOB, resource, status, state)
    if not conditions:
        return ()
    return add_finalizer(
        ELASTIC_JOB, meta, JOB_FINALIZER, state.epoch_annotations, labels={JOB_LABEL: derive_job_id(meta)}
    )


def _no_such_job_condition(meta: Metadata) -> Condition:
    message = f"job {meta.name} does not exist; create an ElasticJob without Ebbtide's annotations"
    return Condition(ACCEPTED, False, "NoSuchJob", message)


def _follow_job(job_resource: _JobResource, job: Job, state: PublishState) -> tuple[int, Writes]:
    """Return the applied generation, and the writes that update spec and labels after a change over HTTP.

    The server increments the generation for our own change. It counts as applied, so that it is not taken for a user's
    change.
    """
    meta, command_ids = job_resource.meta, state.spec_commands.command_ids.get(job_resource.meta.uid, ())
    observed = get_applied_generation(job_resource.resource, meta)
    if job_resource.conditions and (
        job_resource.is_rejected or all(command in state.applied_command_ids for command in command_ids)
    ):
        observed = meta.generation
    spec, job_spec = get_mapping(job_resource.resource, "spec"), build_elastic_job_spec(job)
    is_same = spec.get("gpus") == job_spec["gpus"] and spec.get("suspend", False) == job_spec["suspend"]
    is_settled = job.is_ended or job.intent is Intent.CANCEL or meta.is_deleting or job_resource.is_rejected
    if is_settled or observed != meta.generation:
        return observed, ()
    labels = {} if find_label_changes(meta, job) else build_label_metadata(meta, job)
    if is_same and not labels:
        return observed, ()
    metadata = {**labels, "annotations": {**labels.get("annotations", {}), **state.epoch_annotations}}
    if is_same:  # labels do not change the generation
        return observed, (build_patch(ELASTIC_JOB, meta, {"metadata": metadata}),)
    body = {"metadata": metadata, "spec": {"gpus": job_spec["gpus"], "suspend": job_spec["suspend"]}}
    return meta.generation + 1, (build_patch(ELASTIC_JOB, meta, body),)


def _build_status(
    job: Job, current: Any, job_resource: _JobResource, observed: int, state: PublishState
) -> dict[str, Any]:
    waiting = state.waiting_reasons.get(job.id)
    status = build_job_status(job, waiting, state.snapshot, before=current, accepted=job_resource.conditions)
    return complete_status(status, job_resource.meta, before=current, observed_generation=observed, now_s=state.now_s)


def _has_released_resources(job: Job | None, key: tuple[str, str], state: PublishState) -> bool:
    held = job is not None and (not job.is_ended or job.allocation.held_gpus > 0)
    return not held and key not in state.jobs_with_pods


def _is_expired(job_resource: _JobResource, state: PublishState) -> bool:
    """Return whether a job submitted over HTTP ended longer ago than its retention. Users delete theirs."""
    status = get_mapping(job_resource.resource, "status")
    has_expired = has_ended_phase(status) and state.is_older_than(status.get("endedAt"), state.retention.jobs_s)
    return has_expired and is_from_api(job_resource.meta) and not job_resource.meta.is_deleting


def _build_delete(meta: Metadata) -> Writes:
    return (Delete(ELASTIC_JOB, meta.namespace, meta.name, meta.uid),)


def _build_missing_resources(state: PublishState) -> Iterator[Writes]:
    """Yield the creation of ElasticJobs for jobs submitted over HTTP."""
    metas = (parse_metadata(resource) for resource in state.resources.elastic_jobs)
    present = {(meta.namespace, meta.name) for meta in metas}
    for job in _select_api_jobs(state.snapshot):
        namespace = job.spec.namespace or state.job_namespace
        if (namespace, job.id) in present:
            continue
        body = _build_resource(job, namespace, state.epoch_annotations)
        meta = parse_metadata(body)
        status = _build_status(job, {}, _JobResource(body, meta, job, ()), 1, state)
        yield Create(ELASTIC_JOB, body), build_status_patch(ELASTIC_JOB, meta, status)


def _select_api_jobs(snapshot: Snapshot) -> Iterable[Job]:
    return (job for job in snapshot.jobs.values() if not job.spec.resource_uid and not job.is_ended)


def _build_label_annotation(job: Job) -> dict[str, str]:
    return {LABELS_ANNOTATION: format_common_labels(job.spec.labels)} if job.spec.labels else {}


def _build_resource(job: Job, namespace: str, stamp: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": ELASTIC_JOB.api_version,
        "kind": ELASTIC_JOB.name,
        "metadata": {
            "name": job.id,
            "namespace": namespace,
            "labels": {JOB_LABEL: job.id, MANAGED_BY_LABEL: MANAGED_BY_EBBTIDE, **job.spec.labels},
            "annotations": {**stamp, **_build_label_annotation(job), ORIGIN_ANNOTATION: ORIGIN_API},
            "finalizers": [JOB_FINALIZER],
        },
        "spec": build_elastic_job_spec(job),
    }


_ENDED_LOAN_STATES = (LoanState.RETURNED.value, LoanState.LOST.value, LoanState.VETOED.value)


def compute_pool_writes(state: PublishState) -> Iterator[Writes]:
    for resource in state.resources.pools:
        conditions = state.spec_commands.conditions[parse_metadata(resource).uid]
        current = get_mapping(resource, "status").get("cordonedNodes")
        names = (
            frozenset(name for name in current if isinstance(name, str)) if isinstance(current, list) else frozenset()
        )
        cordoned = state.spec_commands.fleet.cordoned_nodes | names
        status = build_pool_status(
            parse_metadata(resource).name, state.snapshot, conditions=conditions, cordoned=cordoned
        )
        yield _build_finalized_writes(
            POOL, resource, status, state, known=state.snapshot.pools, finalizer=POOL_FINALIZER
        )


def compute_queue_writes(state: PublishState) -> Iterator[Writes]:
    uses = compute_queue_usage(state.snapshot) if state.resources.queues else {}
    for resource in state.resources.queues:
        meta = parse_metadata(resource)
        status = build_queue_status(uses.get(meta.name), state.spec_commands.conditions.get(meta.uid, ()))
        yield _build_finalized_writes(
            QUEUE, resource, status, state, known=state.snapshot.queues, finalizer=QUEUE_FINALIZER
        )


def compute_gpu_profile_writes(state: PublishState) -> Iterator[Writes]:
    for resource in state.resources.gpu_profiles:
        conditions = state.spec_commands.conditions.get(parse_metadata(resource).uid, ())
        status = build_gpu_profile_status(resource, state.snapshot, conditions)
        yield _build_finalized_writes(
            GPU_PROFILE, resource, status, state, known=state.snapshot.gpu_profiles, finalizer=GPU_PROFILE_FINALIZER
        )


def compute_loan_writes(state: PublishState) -> Iterator[Writes]:
    """Yield writes for Loans: one per live loan. Ended Loans stay for their retention."""
    loans = {loan.id: loan for loan in state.snapshot.loans.values()}
    present = {parse_metadata(resource).name: resource for resource in state.resources.loans}
    for name, loan in loans.items():
        if name not in present:
            made = build_loan(loan, state.epoch_annotations)
            yield (
                Create(LOAN, made),
                build_status_patch(LOAN, parse_metadata(made), build_loan_status(loan, state.snapshot)),
            )
    for name, resource in present.items():
        known = loans.get(name) or state.ended_loans.get(name)
        yield _build_loan_writes(resource, known, state)


def find_unreported_loans(resources: ClusterResources, snapshot: Snapshot) -> tuple[str, ...]:
    """Return ids of loans that have left the snapshot and whose resources do not report an outcome yet."""
    live = {loan.id for loan in snapshot.loans.values()}
    reported = {
        parse_metadata(each).name
        for each in resources.loans
        if get_mapping(each, "status").get("state") in _ENDED_LOAN_STATES
    }
    return tuple(name for each in resources.loans if (name := parse_metadata(each).name) not in live | reported)


def _build_loan_writes(resource: Resource, loan: Loan | None, state: PublishState) -> Writes:
    meta, status = state.read_metadata(resource), get_mapping(resource, "status")
    has_ended = status.get("state") in _ENDED_LOAN_STATES
    if has_ended and not state.is_older_than(status.get("stateSince"), state.retention.loans_s):
        return ()
    if meta.is_deleting:
        return ()
    if has_ended or loan is None:
        return (Delete(LOAN, "", meta.name, meta.uid),)
    return build_status_writes(LOAN, resource, build_loan_status(loan, state.snapshot), state)


def _build_finalized_writes(
    kind: ResourceKind,
    resource: Resource,
    status: dict[str, Any],
    state: PublishState,
    *,
    known: Mapping[str, object],
    finalizer: str,
) -> Writes:
    """Return the status, and keep a finalizer on the resource until the fleet no longer contains it."""
    meta = state.read_metadata(resource)
    if meta.is_deleting and meta.name not in known:
        return remove_finalizer(kind, meta, finalizer)
    current = get_mapping(resource, "status")
    written = complete_status(status, meta, before=current, observed_generation=meta.generation, now_s=state.now_s)
    return (
        *add_finalizer(kind, meta, finalizer, state.epoch_annotations),
        *build_status_writes(kind, resource, written, state),
    )
