"""Validation of a job's pod template on Kubernetes."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.documents.document import invalid_field
from scheduler.documents.pod_fields import check_pod_fields
from scheduler.documents.pod_rules import check_pod_rules
from scheduler.domain.agent_bundle import BUNDLE_DIR
from scheduler.domain.quantities import parse_quantity
from scheduler.domain.secret_reference import KUBERNETES_SECRETS_DIR


def strip_nulls(value: Any) -> Any:
    """Return a copy of the JSON value without fields that are null."""
    if isinstance(value, Mapping):
        return {name: strip_nulls(each) for name, each in value.items() if each is not None}
    return [strip_nulls(each) for each in value] if isinstance(value, list) else value


_GPU_RESOURCE_PREFIXES = ("nvidia.com/gpu", "nvidia.com/mig-")
"""Resource names of whole, shared and MIG GPUs."""
RUN_ROOT = "/var/run/ebbtide"
TOKEN_DIR = "/var/run/secrets/ebbtide.dev"
PLAN_DIR = "/etc/ebbtide"
RESERVED_DIRS = (RUN_ROOT, TOKEN_DIR, PLAN_DIR, BUNDLE_DIR, KUBERNETES_SECRETS_DIR)
SHM_DIR = "/dev/shm"
"""Mounted by Ebbtide, unless the template mounts a volume there."""
CHECKPOINT_DIR = "/checkpoints"
"""Checkpoint directory in pods of jobs that set none."""
RESERVED_VOLUME_PREFIX = "ebbtide-"
"""Prefix of the names of volumes that Ebbtide adds."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RESERVED_VARIABLE_FORM = f"a name that Ebbtide does not set: not EBBTIDE_*, {', '.join(RANK_VARIABLES)}"
_RESERVED_FIELDS = ("schedulerName", "nodeName", "restartPolicy", "hostname", "subdomain")


def is_reserved_variable(name: str) -> bool:
    """Return whether Ebbtide sets this environment variable of each rank."""
    return name in RANK_VARIABLES or name.startswith("EBBTIDE_")


def check_template(template: Mapping[str, Any]) -> None:
    """Check a Kubernetes pod template: `metadata` and `spec`. Its first container runs the job.

    Ebbtide sets the scheduler, the node and the GPU requests: as many GPUs on each node as the plan has ranks there.
    All fields are checked when the document is read: one malformed template would stop the rendering of all jobs.

    Args:
        template: without null fields, which count as absent, as in the API server.

    Raises:
        PydanticCustomError: a required field is missing, a field does not exist in Kubernetes or has another type, a
            field is set that Ebbtide sets itself, or the API server would reject the pods.
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
    check_pod_fields(template)
    for kind in ("containers", "initContainers"):
        for number, container in enumerate(spec.get(kind) or ()):
            _check_container_fields(f"spec.{kind}[{number}]", container)
    for path in first_container_mounts(template):
        if path in RESERVED_DIRS:
            raise invalid_field("spec.containers[0].volumeMounts", path, "another path; Ebbtide mounts a volume there")
    for name in volume_sources(template):
        if name.startswith(RESERVED_VOLUME_PREFIX):
            raise invalid_field("spec.volumes", name, f"a name that does not start with {RESERVED_VOLUME_PREFIX}")
    check_pod_rules(template, reserved_volume_prefix=RESERVED_VOLUME_PREFIX)


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
    for number, variable in enumerate(container.get("env") or ()):
        if not variable.get("name"):
            raise invalid_field(f"{place}.env[{number}].name", None, "the name of an environment variable")
        if place == "spec.containers[0]" and is_reserved_variable(variable["name"]):
            raise invalid_field(f"{place}.env[{number}].name", variable["name"], RESERVED_VARIABLE_FORM)
    for kind in ("requests", "limits"):
        for name, amount in ((container.get("resources") or {}).get(kind) or {}).items():
            if name.startswith(_GPU_RESOURCE_PREFIXES):
                allowed = "nothing; Ebbtide requests one GPU per rank on the node. Set gpus.min and gpus.max"
                raise invalid_field(f"{place}.resources.{kind}[{name}]", amount, allowed)
            quantity = parse_quantity(amount)
            if quantity is None or quantity < 0:
                raise invalid_field(f"{place}.resources.{kind}[{name}]", amount, "a quantity such as 500m, 4 or 64Gi")
