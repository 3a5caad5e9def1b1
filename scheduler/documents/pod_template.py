"""The pod template of a job on Kubernetes: what of it has to be there, and what Ebbtide sets itself."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.documents.pod_shape import check_shape
from scheduler.documents.refusal import refused_field

_GPUS = ("nvidia.com/gpu", "nvidia.com/mig-")
"""Whole GPUs, shared ones and parts of some."""
RUN_ROOT = "/var/run/ebbtide"
TOKEN_DIR = "/var/run/secrets/ebbtide.dev"
PLAN_DIR = "/etc/ebbtide"
OUR_DIRS = (RUN_ROOT, TOKEN_DIR, PLAN_DIR)
SHM_DIR = "/dev/shm"
"""Ours too, unless the template mounts something there."""
CHECKPOINT_DIR = "/checkpoints"
"""Where checkpoints go in pods of jobs that name no folder."""
OUR_VOLUMES = "ebbtide-"
"""Names of our volumes begin so."""
_OURS = ("schedulerName", "nodeName", "restartPolicy", "hostname", "subdomain")


def check_template(template: Mapping[str, Any]) -> None:
    """A pod template as Kubernetes has it: `metadata` and `spec`. Its first container runs the job.

    GPUs are requested by Ebbtide, as many on each node as the plan has ranks there, and so are nodes and scheduler.

    Raises:
        PydanticCustomError: what is missing, or what Ebbtide sets itself.
    """
    for name in template:
        if name not in ("metadata", "spec"):
            raise refused_field(name, template[name], "metadata or spec")
    spec = template.get("spec")
    if not isinstance(spec, Mapping):
        raise refused_field("spec", spec, "an object, the spec of a pod")
    containers = spec.get("containers")
    if not isinstance(containers, Sequence) or isinstance(containers, str) or not containers:
        raise refused_field("spec.containers", containers, "a list whose first container runs the job")
    for name in _OURS:
        if name in spec:
            raise refused_field(f"spec.{name}", spec[name], "nothing: Ebbtide sets it")
    check_shape(template)
    for kind in ("containers", "initContainers"):
        for number, container in enumerate(spec.get(kind) or ()):
            _check_container(f"spec.{kind}[{number}]", container)
    for path in first_mounts(template):
        if path in OUR_DIRS:
            raise refused_field("spec.containers[0].volumeMounts", path, "another path: Ebbtide mounts its own there")
    for name in volume_sources(template):
        if name.startswith(OUR_VOLUMES):
            raise refused_field("spec.volumes", name, f"a name that does not begin with {OUR_VOLUMES}")


def first_mounts(template: Mapping[str, Any]) -> dict[str, str]:
    """What is mounted in the first container: the name of a volume by each path."""
    mounts = template["spec"]["containers"][0].get("volumeMounts") or ()
    return {posixpath.normpath(str(each.get("mountPath", ""))): str(each.get("name", "")) for each in mounts}


def volume_sources(template: Mapping[str, Any]) -> dict[str, str]:
    """The kind of each volume, such as persistentVolumeClaim, by its name."""
    volumes = template["spec"].get("volumes") or ()
    return {str(each.get("name", "")): next((str(key) for key in each if key != "name"), "") for each in volumes}


def template_command(template: Mapping[str, Any]) -> tuple[str, ...]:
    """What the template's first container runs: its command with its arguments."""
    first = template["spec"]["containers"][0]
    return (*(first.get("command") or ()), *(first.get("args") or ()))


def template_image(template: Mapping[str, Any]) -> str:
    return str(template["spec"]["containers"][0].get("image") or "")


def _check_container(place: str, container: Mapping[str, Any]) -> None:
    for name in ("command", "args"):
        words = container.get(name)
        if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise refused_field(f"{place}.{name}", words, "a list of words")
    for kind in ("requests", "limits"):
        for name, amount in ((container.get("resources") or {}).get(kind) or {}).items():
            if name.startswith(_GPUS):
                allowed = (
                    "nothing: Ebbtide asks for as many GPUs as the plan has ranks on the node (gpus.min, gpus.max)"
                )
                raise refused_field(f"{place}.resources.{kind}[{name}]", amount, allowed)
