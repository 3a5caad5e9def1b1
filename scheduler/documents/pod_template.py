"""Validation of a job's pod template on Kubernetes."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.documents.document import invalid_field

_NODE_AFFINITY_PATH = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")


def check_structure(template: Mapping[str, Any]) -> None:
    """Check the structure of the parts of a template that Ebbtide adds to.

    They are checked when the document is read, because one malformed template would stop the rendering of all jobs.
    Null fields count as absent, as in the API server. `template` must have a `spec` with `containers`.

    Raises:
        PydanticCustomError: a part has a type that the API server rejects.
    """
    meta, spec = _require_object("metadata", template.get("metadata")), template["spec"]
    for name in ("labels", "annotations"):
        for key, text in _require_object(f"metadata.{name}", meta.get(name)).items():
            if text is not None and not isinstance(text, str):
                raise invalid_field(f"metadata.{name}[{key}]", text, "a string")
    for name in ("volumes", "tolerations"):
        _require_objects(f"spec.{name}", spec.get(name))
    for name in ("containers", "initContainers"):
        for place, container in _require_objects(f"spec.{name}", spec.get(name)):
            _check_container_structure(place, container)
    _check_affinity(spec)


def strip_nulls(value: Any) -> Any:
    """Return a copy of the JSON value without fields that are null."""
    if isinstance(value, Mapping):
        return {name: strip_nulls(each) for name, each in value.items() if each is not None}
    return [strip_nulls(each) for each in value] if isinstance(value, list) else value


def _check_container_structure(place: str, container: Mapping[str, Any]) -> None:
    _require_objects(f"{place}.volumeMounts", container.get("volumeMounts"))
    for env_place, variable in _require_objects(f"{place}.env", container.get("env")):
        if not isinstance(variable.get("name"), str):
            raise invalid_field(f"{env_place}.name", variable.get("name"), "the name of an environment variable")
    resources = _require_object(f"{place}.resources", container.get("resources"))
    for kind in ("requests", "limits"):
        _require_object(f"{place}.resources.{kind}", resources.get(kind))


def _check_affinity(spec: Mapping[str, Any]) -> None:
    place, part = "spec", spec
    for name in _NODE_AFFINITY_PATH:
        place = f"{place}.{name}"
        part = _require_object(place, part.get(name))
    for term_place, term in _require_objects(f"{place}.nodeSelectorTerms", part.get("nodeSelectorTerms")):
        _require_objects(f"{term_place}.matchFields", term.get("matchFields"))


def _require_object(place: str, value: object) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise invalid_field(place, value, "an object")
    return value or {}


def _require_objects(place: str, value: object) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Return the objects of a list, each with its path."""
    if value is not None and not isinstance(value, list):
        raise invalid_field(place, value, "a list of objects")
    for number, each in enumerate(value or ()):
        if not isinstance(each, Mapping):
            raise invalid_field(f"{place}[{number}]", each, "an object")
    return tuple((f"{place}[{number}]", each) for number, each in enumerate(value or ()))


_GPU_RESOURCE_PREFIXES = ("nvidia.com/gpu", "nvidia.com/mig-")
"""Resource names of whole, shared and MIG GPUs."""
RUN_ROOT = "/var/run/ebbtide"
TOKEN_DIR = "/var/run/secrets/ebbtide.dev"
PLAN_DIR = "/etc/ebbtide"
RESERVED_DIRS = (RUN_ROOT, TOKEN_DIR, PLAN_DIR)
SHM_DIR = "/dev/shm"
"""Mounted by Ebbtide, unless the template mounts a volume there."""
CHECKPOINT_DIR = "/checkpoints"
"""Checkpoint directory in pods of jobs that set none."""
RESERVED_VOLUME_PREFIX = "ebbtide-"
"""Prefix of the names of volumes that Ebbtide adds."""
_RESERVED_FIELDS = ("schedulerName", "nodeName", "restartPolicy", "hostname", "subdomain")


def check_template(template: Mapping[str, Any]) -> None:
    """Check a Kubernetes pod template: `metadata` and `spec`. Its first container runs the job.

    Ebbtide sets the scheduler, the node and the GPU requests: as many GPUs on each node as the plan has ranks there.

    Raises:
        PydanticCustomError: a required field is missing, or a field is set that Ebbtide sets itself.
    """
    for name in template:
        if name not in ("metadata", "spec"):
            raise invalid_field(name, template[name], "metadata or spec")
    spec = template.get("spec")
    if not isinstance(spec, Mapping):
        raise invalid_field("spec", spec, "an object, the spec of a pod")
    containers = spec.get("containers")
    if not isinstance(containers, Sequence) or isinstance(containers, str) or not containers:
        raise invalid_field("spec.containers", containers, "a list whose first container runs the job")
    for name in _RESERVED_FIELDS:
        if name in spec:
            raise invalid_field(f"spec.{name}", spec[name], "nothing; Ebbtide sets this field")
    check_structure(template)
    for kind in ("containers", "initContainers"):
        for number, container in enumerate(spec.get(kind) or ()):
            _check_container_fields(f"spec.{kind}[{number}]", container)
    for path in first_container_mounts(template):
        if path in RESERVED_DIRS:
            raise invalid_field("spec.containers[0].volumeMounts", path, "another path; Ebbtide mounts a volume there")
    for name in volume_sources(template):
        if name.startswith(RESERVED_VOLUME_PREFIX):
            raise invalid_field("spec.volumes", name, f"a name that does not start with {RESERVED_VOLUME_PREFIX}")


def first_container_mounts(template: Mapping[str, Any]) -> dict[str, str]:
    """Return the volume name by mount path of the first container."""
    mounts = template["spec"]["containers"][0].get("volumeMounts") or ()
    return {posixpath.normpath(str(each.get("mountPath", ""))): str(each.get("name", "")) for each in mounts}


def volume_sources(template: Mapping[str, Any]) -> dict[str, str]:
    """Return the type of each volume by name, for example persistentVolumeClaim."""
    volumes = template["spec"].get("volumes") or ()
    return {str(each.get("name", "")): next((str(key) for key in each if key != "name"), "") for each in volumes}


def template_command(template: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command of the template's first container, with its arguments."""
    first = template["spec"]["containers"][0]
    return (*(first.get("command") or ()), *(first.get("args") or ()))


def template_image(template: Mapping[str, Any]) -> str:
    return str(template["spec"]["containers"][0].get("image") or "")


def _check_container_fields(place: str, container: Mapping[str, Any]) -> None:
    for name in ("command", "args"):
        words = container.get(name)
        if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise invalid_field(f"{place}.{name}", words, "a list of strings")
    for kind in ("requests", "limits"):
        for name, amount in ((container.get("resources") or {}).get(kind) or {}).items():
            if name.startswith(_GPU_RESOURCE_PREFIXES):
                allowed = "nothing; Ebbtide requests one GPU per rank on the node. Set gpus.min and gpus.max"
                raise invalid_field(f"{place}.resources.{kind}[{name}]", amount, allowed)
