"""ElasticJob: the custom resource of a job, to and from what the domain knows of one."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from hashlib import sha256
from typing import Any

from scheduler.documents.fields import LABEL_FORM
from scheduler.documents.job import job_document, read_job
from scheduler.documents.refusal import Refusal, RefusedError, shown
from scheduler.domain.job import Intent, Job, JobSpec
from scheduler.k8s.kinds import FROM_API, MANAGED_BY, ORIGIN_ANNOTATION
from scheduler.k8s.resources.metadata import Metadata, Resource, metadata, observed_generation, part
from scheduler.solver.profiles.shipped import ProfileError, gpu_names, model_names, parse_model

NAME_CHARACTERS = 52
"""So that the job's id, ten characters and a dash longer, can be a label and begin the name of a pod."""
_DURATIONS = ("durationEstimate", "deadline", "maxRunTime")
_CHANGEABLE = ("gpus", "suspend")


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """What an ElasticJob asks for."""

    spec: JobSpec
    suspend: bool


def is_managed_by_us(resource: Resource) -> bool:
    """Whether the job is ours to run: nobody else is named."""
    return part(resource, "spec").get("managedBy", "") in ("", None, MANAGED_BY)


def is_from_api(meta: Metadata) -> bool:
    """Whether the job was there before its resource: it was asked for over HTTP."""
    return meta.annotations.get(ORIGIN_ANNOTATION) == FROM_API


def job_id_of(meta: Metadata) -> str:
    """The job of an ElasticJob. A resource that is deleted and made anew, with another uid, is another job."""
    if is_from_api(meta):
        return meta.name
    return f"{meta.name}-{base64.b32encode(sha256(meta.uid.encode()).digest()).decode().lower()[:6]}"


def job_of(meta: Metadata, jobs: Mapping[str, Job], job_namespace: str) -> Job | None:
    """The job of an ElasticJob, if it is among `jobs`. Names and annotations are the user's to write: a resource that
    claims a job of another namespace, or of another resource, has none."""
    job = jobs.get(job_id_of(meta))
    if job is None:
        return None
    if is_from_api(meta):
        is_its = not job.spec.resource_uid and (job.spec.namespace or job_namespace) == meta.namespace
    else:
        is_its = job.spec.resource_uid == meta.uid
    return job if is_its else None


def taken_generation(resource: Resource, meta: Metadata) -> int:
    """The generation of the spec that the job was last made to follow, or that was made to follow the job; the first
    of a resource of ours was. -1 where there is none yet."""
    return max(observed_generation(resource), 1 if is_from_api(meta) else -1)


def read_elastic_job(resource: Resource) -> ElasticJob:
    """What the resource asks for.

    Raises:
        RefusedError: fields are refused; the message names each with its value and what is allowed.
    """
    meta, spec = metadata(resource), resource.get("spec")
    if not isinstance(spec, Mapping):
        raise RefusedError(Refusal("spec", shown(spec), "an object, the job document"))
    if "name" not in spec and len(meta.name) > NAME_CHARACTERS:
        raise RefusedError(Refusal("metadata.name", shown(meta.name), LABEL_FORM))
    suspend = spec.get("suspend", False)
    if not isinstance(suspend, bool):
        raise RefusedError(Refusal("suspend", shown(suspend), "true or false"))
    if "namespace" in spec:
        raise RefusedError(Refusal("namespace", shown(spec["namespace"]), "nothing: metadata.namespace says it"))
    document = {name: value for name, value in spec.items() if name not in ("suspend", "managedBy")}
    job = read_job({"name": meta.name, **document})
    if not job.command and not job.template_json and not is_from_api(meta):
        raise RefusedError(Refusal("command", None, "at least one word, or a template: what the job runs"))
    _check_names(job)
    return ElasticJob(replace(job, namespace=meta.namespace, resource_uid=meta.uid), suspend)


def elastic_job_spec(job: Job) -> dict[str, Any]:
    """The spec of the ElasticJob that asks for what the job's owner wants now."""
    document = job_document(job.spec)
    document.pop("namespace", None)
    checkpoint = document["checkpoint"]
    for holder, name in (*((document, name) for name in _DURATIONS if name in document), (checkpoint, "interval")):
        holder[name] = _duration(holder[name])
    return {**document, "suspend": job.intent is Intent.SUSPEND}


def fixed_fields_changed(wanted: JobSpec, job: Job) -> tuple[str, ...]:
    """Fields of the spec in which the resource differs from its job, though they are settled once it is submitted."""
    asked, present = (elastic_job_spec(replace(job, spec=spec)) for spec in (wanted, job.spec))
    names = [name for name in (*asked, *present) if name not in _CHANGEABLE]
    return tuple(name for name in dict.fromkeys(names) if asked.get(name) != present.get(name))


def _duration(seconds: float) -> int | str:
    """Numbers of the custom resource are whole; others are written as text without an exponent."""
    return int(seconds) if seconds.is_integer() else f"{Decimal(repr(seconds)):f}s"


def _check_names(spec: JobSpec) -> None:
    if spec.gpu and spec.gpu not in gpu_names():
        raise RefusedError(Refusal("gpu", shown(spec.gpu), f"one of {', '.join(gpu_names())}"))
    if spec.model and spec.model not in model_names():
        raise RefusedError(Refusal("model", shown(spec.model), f"one of {', '.join(model_names())}"))
    if spec.profile_json:
        try:
            parse_model(spec.profile_json, spec.sequence_length)
        except ProfileError as wrong:
            raise RefusedError(Refusal("profile", None, str(wrong))) from None
