"""The status of an ElasticJob: phase, reason, progress and conditions."""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from scheduler.documents.pod_template import CHECKPOINT_DIR, first_container_mounts, volume_sources
from scheduler.domain import gpu_sets
from scheduler.domain.checkpoints import CheckpointSpec, is_object_store
from scheduler.domain.decisions import Reason
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import ENDED_STATES, JobState
from scheduler.domain.parallel_plan import plan_to_json
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import JOB_LABEL
from scheduler.kubernetes.resources.meta import (
    ACCEPTED,
    CHECKPOINTS_SHARED,
    COMPLETE,
    FAILED,
    NODES_ADMIT_PODS,
    PODS_STARTED,
    SCHEDULED,
    SUSPENDED,
    VOLUMES_READY,
    Condition,
    Metadata,
    build_status_conditions,
    find_previous_condition,
    format_time,
)

_POD_LOCAL_KINDS = ("configMap", "downwardAPI", "emptyDir", "ephemeral", "image", "projected", "secret")
_NODE_DEPENDENT_KINDS = ("csi", "flexVolume", "hostPath")
_REMEDY = (
    "set checkpoint.volume to a persistentVolumeClaim with access mode ReadWriteMany, or checkpoint.dir to the URL of "
    "an object store"
)


def build_checkpoints_condition(spec: JobSpec) -> Condition:
    """Return the condition CheckpointsShared: all current and future pods of the job see the same checkpoints."""
    return _build_cached_condition(spec.checkpoint, spec.template_json)


@lru_cache(maxsize=4096)
def _build_cached_condition(checkpoint: CheckpointSpec, template_json: str) -> Condition:
    directory, volume = checkpoint.dir or CHECKPOINT_DIR, checkpoint.volume
    if is_object_store(directory):
        return Condition(CHECKPOINTS_SHARED, True, "ObjectStore", f"the job saves to {directory}")
    if volume is not None:
        subdirectory = volume.sub_path or "the job's own directory"
        return Condition(
            CHECKPOINTS_SHARED, True, "ClaimMounted", f"{directory} is {subdirectory} in claim {volume.claim}"
        )
    name, kind = _find_template_volume(directory, template_json)
    if kind in _NODE_DEPENDENT_KINDS:
        message = (
            f"{directory} is in {name} of the template ({kind}): shared only if all nodes see the same files there"
        )
        return Condition(CHECKPOINTS_SHARED, None, "NodesDecide", message)
    if kind and kind not in _POD_LOCAL_KINDS:
        return Condition(
            CHECKPOINTS_SHARED, True, "TemplateMounts", f"{directory} is in {name} of the template ({kind})"
        )
    location = f"{directory} is in {name} of the template ({kind})" if kind else f"nothing is mounted at {directory}"
    consequence = "checkpoints are lost with the pod that wrote them"
    return Condition(CHECKPOINTS_SHARED, False, "InPodsOnly", f"{location}: {consequence}; {_REMEDY}")


def _find_template_volume(directory: str, template_json: str) -> tuple[str, str]:
    """Return name and kind of the template volume that contains the directory, empty without one."""
    if not template_json:
        return "", ""
    template = json.loads(template_json)
    mounts, path = first_container_mounts(template), posixpath.normpath(directory)
    while path not in mounts and path != posixpath.dirname(path):
        path = posixpath.dirname(path)
    name = mounts.get(path, "")
    return name, volume_sources(template).get(name, "")


REFUSED = "Refused"
_END_PHASES = frozenset(state.capitalize() for state in ENDED_STATES)
_ACCEPTED_CONDITION = Condition(ACCEPTED, True, "Accepted", "")


def has_ended_phase(status: Mapping[str, Any]) -> bool:
    """Return whether the status reports an outcome. Accepts any content."""
    phase = status.get("phase")
    return isinstance(phase, str) and phase in _END_PHASES


def build_job_status(
    job: Job, waiting: Reason | None, snapshot: Snapshot, *, before: Mapping[str, Any], accepted: Iterable[Condition]
) -> dict[str, Any]:
    """Return the status, to be completed by `complete_status`.

    `before` is the current status, which may hold anything. `accepted` are the conditions of the spec if it was just
    read.
    """
    allocation, account = job.allocation, job.account
    spec_conditions = (
        tuple(accepted) or find_previous_condition(before.get("conditions"), ACCEPTED) or (_ACCEPTED_CONDITION,)
    )
    refusal = next((condition for condition in spec_conditions if not condition.holds), None)
    reason, message = (refusal.reason, refusal.message) if refusal else _choose_reason(job, waiting)
    status = {
        "jobId": job.id,
        "phase": job.state.capitalize(),
        "reason": reason,
        "message": message,
        "gpus": f"{0 if job.is_ended else allocation.held_gpus}/{job.spec.max_gpus}",
        "planSummary": allocation.plan.summarize() if allocation.plan else None,
        "selector": f"{JOB_LABEL}={job.id}",
        "submittedAt": format_time(job.submitted_at_s),
        "startedAt": None if account.first_started_at_s is None else format_time(account.first_started_at_s),
        "endedAt": format_time(job.state_since_s) if job.is_ended else None,
        "allocation": _format_allocation(job, snapshot),
        "plan": json.loads(json.dumps(plan_to_json(allocation.plan))) if allocation.plan else None,
        "progress": _format_progress(job, snapshot.now_s),
        "conditions": (*spec_conditions, *_build_job_conditions(job, waiting)),
    }
    return {name: value for name, value in status.items() if value not in (None, "")}


def build_refused_status(conditions: Iterable[Condition]) -> dict[str, Any]:
    """Return the status of a resource with an invalid spec."""
    conditions = tuple(conditions)
    invalid = next(condition for condition in conditions if not condition.holds)
    return {"phase": REFUSED, "reason": invalid.reason, "message": invalid.message, "conditions": conditions}


def complete_status(
    status: dict[str, Any], meta: Metadata, *, before: Mapping[str, Any], observed_generation: int, now_s: float
) -> dict[str, Any]:
    """Return the status with full conditions, the observed generation and the time."""
    spec_conditions = status["conditions"]
    conditions_with_times = build_status_conditions(
        spec_conditions, before.get("conditions"), now_s=now_s, generation=max(observed_generation, 0)
    )
    observed = {"observedGeneration": observed_generation} if observed_generation >= 0 else {}
    return {**status, **observed, "conditions": conditions_with_times, "asOf": format_time(now_s)}


def _format_allocation(job: Job, snapshot: Snapshot) -> dict[str, Any]:
    nodes = [
        {"name": name, "gpus": len(indices), "lent": name in snapshot.nodes and snapshot.is_lent(snapshot.nodes[name])}
        for name, indices in sorted(job.allocation.target.items())
    ]
    return {"gpus": job.allocation.target_gpus, "generation": job.allocation.generation, "nodes": nodes}


def _format_progress(job: Job, now_s: float) -> dict[str, Any]:
    """Return progress and the remaining time at the current speed.

    Values that are not finite are omitted, and those that the job never reported.
    """
    if not job.has_known_steps:
        return {"steps": job.spec.steps} if job.spec.steps else {}
    steps, length = job.steps_at(now_s), job.spec.steps
    remaining, step_time_s = job.remaining_steps(now_s), job.step_time_s()
    runs = step_time_s < math.inf
    figures = {
        "percentage": min(100, int(100 * steps / length)) if length else None,
        "step": int(steps),
        "steps": length or None,
        "loss": job.progress.loss,
        "samplesPerSecond": job.progress.samples_per_s if runs else None,
        "estimatedRemainingSeconds": math.ceil(remaining * step_time_s) if runs and remaining is not None else None,
    }
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def _choose_reason(job: Job, waiting: Reason | None) -> tuple[str, str]:
    if job.intent is Intent.CANCEL and not job.is_ended:
        return "Cancelling", job.message
    if waiting is not None and not job.is_placed and not job.is_ended:
        return waiting.code.value, waiting.detail
    return "", job.message


def _build_job_conditions(job: Job, waiting: Reason | None) -> Iterable[Condition]:
    if job.is_placed:
        yield Condition(
            SCHEDULED,
            True,
            "Placed",
            f"{gpu_sets.format_gpu_count(job.allocation.target_gpus)} on {_format_nodes(job)}",
        )
    else:
        reason, message = _choose_reason(job, waiting)
        yield Condition(SCHEDULED, False, reason or job.state.capitalize(), message)
    suspended = job.intent is Intent.SUSPEND
    yield Condition(SUSPENDED, suspended, "OwnerAsked" if suspended else "NotAsked")
    yield from _build_placement_conditions(job)
    yield build_checkpoints_condition(job.spec)
    if job.state is JobState.SUCCEEDED:
        yield Condition(COMPLETE, True, "Succeeded", job.message)
    elif job.is_ended:
        yield Condition(FAILED, True, job.state.capitalize(), job.message)


def _build_placement_conditions(job: Job) -> Iterable[Condition]:
    """Yield what nodes and volumes said about the job's pods, if there is anything to say."""
    placement = job.placement
    if placement.last is not None:
        count = f"{placement.streak} start{'s' * (placement.streak > 1)} in a row"
        yield Condition(NODES_ADMIT_PODS, False, placement.last.reason, f"{placement.last}; {count} refused")
    elif placement.avoided:
        yield Condition(NODES_ADMIT_PODS, True, "Admitted")
    if job.is_placed and job.state is not JobState.RUNNING and job.message:
        yield Condition(PODS_STARTED, False, "PodsNotReady", job.message)
    if placement.volumes is not None and job.spec.pod_requirements.claims:
        facts = placement.volumes
        yield Condition(VOLUMES_READY, not facts.error, facts.reason or "Bound", facts.error)


def _format_nodes(job: Job) -> str:
    names = sorted(job.allocation.target)
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
