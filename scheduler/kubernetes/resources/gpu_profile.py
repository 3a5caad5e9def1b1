"""GpuProfiles: parsing specs into GPU profiles, and building statuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.alias_generators import to_camel

from scheduler.documents.document import (
    Document,
    InvalidDocumentError,
    InvalidField,
    UnknownField,
    parse_document,
    to_printable,
)
from scheduler.documents.hardware import PROFILE_BYTES_MAX, GpuName
from scheduler.domain.hardware import GpuProfile
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.suggestions import suggest
from scheduler.kubernetes.api_objects import GPU_PROFILE
from scheduler.kubernetes.resources.meta import Condition, Resource, get_mapping, parse_metadata
from scheduler.solver.profiles.catalog import ProfileError, parse_gpu
from scheduler.solver.profiles.gpu_document import GPU_FIELDS

PROFILE_FIELDS = {to_camel(name): name for name in GPU_FIELDS if name != "gpu"}
"""Fields of a profile by their names in the spec. The resource's own name is the GPU model."""
_FIELD_NAMES = re.compile(rf"\b({'|'.join(PROFILE_FIELDS.values())})\b")


class _NameDocument(Document):
    name: GpuName


def parse_gpu_profile(resource: Resource) -> str:
    """Return the profile as JSON text, in the form that `ebbtide profile` writes.

    Raises:
        InvalidDocumentError: the name or a field is invalid, or the profile is too large.
        ProfileError: a figure is missing or invalid. The message names the field of the spec and what is accepted.
    """
    name, spec = parse_metadata(resource).name, get_mapping(resource, "spec")
    parse_document(_NameDocument, {"name": name})
    for field in spec:
        if field not in PROFILE_FIELDS:
            allowed = f"one of the fields {', '.join(PROFILE_FIELDS)}{suggest(field, PROFILE_FIELDS)}"
            raise InvalidDocumentError(UnknownField(field, to_printable(spec[field]), allowed))
    text = json.dumps({"gpu": name, **{PROFILE_FIELDS[field]: value for field, value in spec.items()}})
    if len(text) > PROFILE_BYTES_MAX:
        allowed = f"a profile of at most {PROFILE_BYTES_MAX} bytes"
        raise InvalidDocumentError(InvalidField("spec", f"{len(text)} bytes", allowed))
    try:
        parse_gpu(text)
    except ProfileError as error:
        raise ProfileError(_FIELD_NAMES.sub(lambda found: to_camel(found[1]), str(error))) from None
    return text


def build_gpu_profile(name: str, profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GpuProfile of a profile as `ebbtide profile` writes it."""
    return {
        "apiVersion": GPU_PROFILE.api_version,
        "kind": GPU_PROFILE.name,
        "metadata": {"name": name},
        "spec": {to_camel(field): value for field, value in profile.items() if field != "gpu"},
    }


def is_equal_profile(profile_json: str, existing: GpuProfile | None) -> bool:
    """Return whether the profile is the existing one. The API server may reorder the fields of a spec."""
    return existing is not None and bool(json.loads(profile_json) == json.loads(existing.profile_json))


def build_gpu_profile_status(resource: Resource, snapshot: Snapshot, conditions: Iterable[Condition]) -> dict[str, Any]:
    """Return the status without its time.

    `appliedGeneration` is the generation of the spec that plans are computed from. It stays if a newer spec is refused.
    """
    meta, conditions = parse_metadata(resource), tuple(conditions)
    profile = snapshot.gpu_profiles.get(meta.name)
    is_applied = any(each.holds for each in conditions) and is_equal_profile(parse_gpu_profile(resource), profile)
    before = get_mapping(resource, "status").get("appliedGeneration")
    status = {
        "version": None if profile is None else profile.version,
        "appliedGeneration": meta.generation if is_applied else before if profile is not None else None,
        "nodes": sum(node.gpu == meta.name for node in snapshot.nodes.values()),
        "conditions": conditions,
    }
    return {key: value for key, value in status.items() if value is not None}
