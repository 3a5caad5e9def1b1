"""ElasticJob specs: parsing into a JobSpec, and building from a Job."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from hashlib import sha256
from typing import Any

from scheduler.documents.document import LABEL_FORM, InvalidDocumentError, InvalidField, to_printable
from scheduler.documents.job import parse_job, to_job_document
from scheduler.documents.job_labels import select_object_labels
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_labels import compute_label_changes
from scheduler.domain.job_spec import JobSpec
from scheduler.kubernetes.api_objects import (
    LABELS_ANNOTATION,
    MANAGED_BY,
    MANAGED_BY_EBBTIDE,
    MANAGED_BY_LABEL,
    ORIGIN_ANNOTATION,
    ORIGIN_API,
)
from scheduler.kubernetes.resources.meta import Metadata, Resource, get_mapping, get_observed_generation, parse_metadata
from scheduler.solver.profiles.catalog import ProfileError, list_gpu_names, list_model_names, parse_model
from scheduler.solver.profiles.job_model import find_lengths_problem

NAME_MAX_LENGTH = 52
"""Leaves room for the job id (a dash and up to ten characters more), which must be a label and a pod name prefix."""
_DURATION_FIELDS = ("durationEstimate", "deadline", "maxRunTime", "hangTimeout")
_MUTABLE_FIELDS = ("gpus", "suspend")


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """A parsed ElasticJob spec."""

    spec: JobSpec
    suspend: bool


def is_managed_by_us(resource: Resource) -> bool:
    """Return whether Ebbtide runs the job: `managedBy` names no other controller."""
    return get_mapping(resource, "spec").get("managedBy", "") in ("", None, MANAGED_BY)


def is_from_api(meta: Metadata) -> bool:
    """Return whether the job was submitted over HTTP, before its resource existed."""
    return meta.annotations.get(ORIGIN_ANNOTATION) == ORIGIN_API


def derive_job_id(meta: Metadata) -> str:
    """Return the job id. A recreated resource, with another uid, is another job."""
    if is_from_api(meta):
        return meta.name
    return f"{meta.name}-{base64.b32encode(sha256(meta.uid.encode()).digest()).decode().lower()[:6]}"


def find_job(meta: Metadata, jobs: Mapping[str, Job], job_namespace: str) -> Job | None:
    """Return the job of an ElasticJob, or None.

    Users can edit names and annotations, so a resource that claims a job of another namespace or resource has none.
    """
    job = jobs.get(derive_job_id(meta))
    if job is None:
        return None
    if is_from_api(meta):
        is_owner = not job.spec.resource_uid and (job.spec.namespace or job_namespace) == meta.namespace
    else:
        is_owner = job.spec.resource_uid == meta.uid
    return job if is_owner else None


def get_applied_generation(resource: Resource, meta: Metadata) -> int:
    """Return the last generation of the spec that was applied to the job or written from it, -1 without one."""
    return max(get_observed_generation(resource), 1 if is_from_api(meta) else -1)


def parse_elastic_job(resource: Resource) -> ElasticJob:
    """Parse the spec.

    Raises:
        RefusedError: invalid fields; the message names each with its value and the accepted values.
    """
    meta, spec = parse_metadata(resource), resource.get("spec")
    if not isinstance(spec, Mapping):
        raise InvalidDocumentError(InvalidField("spec", to_printable(spec), "an object, the job document"))
    if "name" not in spec and len(meta.name) > NAME_MAX_LENGTH:
        raise InvalidDocumentError(InvalidField("metadata.name", to_printable(meta.name), LABEL_FORM))
    suspend = spec.get("suspend", False)
    if not isinstance(suspend, bool):
        raise InvalidDocumentError(InvalidField("suspend", to_printable(suspend), "true or false"))
    if "namespace" in spec:
        raise InvalidDocumentError(
            InvalidField("namespace", to_printable(spec["namespace"]), "nothing: set metadata.namespace instead")
        )
    if "labels" in spec:
        raise InvalidDocumentError(InvalidField("labels", None, "nothing: set metadata.labels instead"))
    document = {name: value for name, value in spec.items() if name not in ("suspend", "managedBy")}
    job = parse_job({"name": meta.name, **document, "labels": get_object_labels(meta)})
    if not job.command and not job.template_json and not is_from_api(meta):
        raise InvalidDocumentError(InvalidField("command", None, "at least one word, or a template"))
    _check_profile_names(job)
    return ElasticJob(replace(job, namespace=meta.namespace, resource_uid=meta.uid), suspend)


def build_elastic_job_spec(job: Job) -> dict[str, Any]:
    """Return the spec that describes the job's current state."""
    document = to_job_document(job.spec)
    for name in ("namespace", "labels"):  # these are metadata of the resource
        document.pop(name, None)
    for holder, name in (
        *((document, name) for name in _DURATION_FIELDS if isinstance(document.get(name), float)),
        (document["checkpoint"], "interval"),
    ):
        holder[name] = _format_duration(holder[name])
    return {**document, "suspend": job.intent is Intent.SUSPEND}


def get_object_labels(meta: Metadata) -> dict[str, str]:
    """Return the labels of the resource that are labels of its job: all but those that Ebbtide gives it."""
    labels = select_object_labels(meta.labels)
    if labels.get(MANAGED_BY_LABEL) == MANAGED_BY_EBBTIDE:
        del labels[MANAGED_BY_LABEL]
    return labels


def find_label_changes(meta: Metadata, job: Job) -> dict[str, str | None]:
    """Return the changes of the resource's labels that its job does not have yet."""
    changes = compute_label_changes(_read_common_labels(meta), get_object_labels(meta))
    return {key: value for key, value in changes.items() if job.spec.labels.get(key) != value}


def build_label_metadata(meta: Metadata, job: Job) -> dict[str, dict[str, str | None]]:
    """Return the merge patch of the metadata after which the resource has the job's labels. Empty: it has them."""
    labels = job.spec.labels
    if get_object_labels(meta) == labels == _read_common_labels(meta):
        return {}
    changes = compute_label_changes(get_object_labels(meta), labels)
    return {"labels": changes, "annotations": {LABELS_ANNOTATION: format_common_labels(labels)}}


def format_common_labels(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(labels.items())), separators=(",", ":"))


def _read_common_labels(meta: Metadata) -> dict[str, str]:
    """Return the labels in the annotation, which users can edit. Without a valid one, there are none."""
    try:
        labels = json.loads(meta.annotations.get(LABELS_ANNOTATION, "{}"))
    except (ValueError, RecursionError):
        return {}
    is_valid = isinstance(labels, dict) and all(isinstance(value, str) for value in labels.values())
    return labels if is_valid else {}


def find_immutable_changes(new_spec: JobSpec, job: Job) -> tuple[str, ...]:
    """Return the immutable fields in which the resource differs from its job."""
    if job.spec.on_resize is None:  # older versions did not derive it from `checkpoint`
        new_spec = replace(new_spec, on_resize=None)
    new, current = (build_elastic_job_spec(replace(job, spec=spec)) for spec in (new_spec, job.spec))
    names = [name for name in (*new, *current) if name not in _MUTABLE_FIELDS]
    return tuple(name for name in dict.fromkeys(names) if new.get(name) != current.get(name))


def _format_duration(seconds: float) -> int | str:
    """Return whole seconds as a number, others as text without an exponent, because the schema has no fractions."""
    return int(seconds) if seconds.is_integer() else f"{Decimal(repr(seconds)):f}s"


def _check_profile_names(spec: JobSpec) -> None:
    named = (*((("gpu", spec.gpu),) if spec.gpu else ()), *(("speeds", gpu) for gpu in spec.speeds))
    for field, gpu in named:
        if gpu not in list_gpu_names():
            raise InvalidDocumentError(InvalidField(field, to_printable(gpu), f"one of {', '.join(list_gpu_names())}"))
    if spec.model and spec.model not in list_model_names():
        raise InvalidDocumentError(
            InvalidField("model", to_printable(spec.model), f"one of {', '.join(list_model_names())}")
        )
    if spec.profile_json:
        try:
            parse_model(spec.profile_json, spec.sequence_length)
        except ProfileError as error:
            raise InvalidDocumentError(InvalidField("profile", None, str(error))) from None
    if problem := find_lengths_problem(spec):
        raise InvalidDocumentError(InvalidField("lengths", spec.lengths[-1][0], problem))
