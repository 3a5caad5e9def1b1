"""Where a job's checkpoints go: a folder, and on Kubernetes the volume that all its pods mount there.

The job document: one form for REST, the command line and, later, the custom resource; to and from JobSpec.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import (
    CAMEL_CASE,
    Document,
    InvalidDocumentError,
    InvalidField,
    Label,
    Text,
    invalid_field,
    parse_document,
    to_printable,
)
from scheduler.documents.pod_template import (
    CHECKPOINT_DIR,
    RESERVED_DIRS,
    SHM_DIR,
    check_template,
    first_container_mounts,
    strip_nulls,
    template_command,
    template_image,
)
from scheduler.documents.units import PositiveDuration
from scheduler.domain.job import CheckpointSpec, CheckpointVolume, JobSpec

_CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_CLAIM_NAME_FORM = "1 to 253 of a-z, 0-9, '-' and '.', beginning and ending with a letter or digit"
_RESERVED_PATHS = (*RESERVED_DIRS, SHM_DIR)


def _check_claim_name(name: str) -> str:
    if not _CLAIM_NAME.fullmatch(name):
        raise PydanticCustomError("name", "Input should be {form}", {"form": _CLAIM_NAME_FORM})
    return name


def _check_relative_path(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise PydanticCustomError("path", "Input should be a path in the volume: relative, without '..'")
    return path


class ClaimDocument(Document):
    model_config = CAMEL_CASE
    claim_name: Annotated[str, Field(description=_CLAIM_NAME_FORM), AfterValidator(_check_claim_name)]


class VolumeDocument(Document):
    """A persistent volume claim of the job's namespace, already bound, that all nodes can mount at once. Other kinds of
    volumes are for `template`: nfs and hostPath, which restricted namespaces forbid, and what lives with one pod."""

    model_config = CAMEL_CASE
    persistent_volume_claim: ClaimDocument
    sub_path: Annotated[Text, Field(min_length=1, max_length=1024), AfterValidator(_check_relative_path)] | None = (
        Field(
            default=None,
            description="Folder in it; absent: one named by the job's id, so that jobs may share the claim.",
        )
    )


class CheckpointDocument(Document):
    """Where checkpoints go (empty: a folder that the executor chooses), how often, and how many are kept. `volume` is
    mounted there in the job's pods; without one, or one of the template's, checkpoints live and die with each pod."""

    model_config = CAMEL_CASE
    dir: Text = ""
    interval: PositiveDuration = 900.0
    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = 2
    volume: VolumeDocument | None = None

    @model_validator(mode="after")
    def _check_mount_path(self) -> Self:
        if self.volume is not None and self.dir and not _is_mount_path(self.dir):
            taken = ", ".join(_RESERVED_PATHS)
            allowed = f"an absolute path without ':' and '..', none of /, {taken}: checkpoint.volume is mounted there"
            raise invalid_field("dir", self.dir, allowed)
        return self


def check_checkpoint_mount(checkpoint: CheckpointDocument, template: Mapping[str, Any]) -> None:
    """For the validator of a job: nothing can be mounted twice at one place.

    Raises:
        PydanticCustomError: the template's first container has a volume where `checkpoint.volume` is to be.
    """
    place = posixpath.normpath(checkpoint.dir or CHECKPOINT_DIR)
    if checkpoint.volume is not None and place in first_container_mounts(template):
        claim = checkpoint.volume.persistent_volume_claim.claim_name
        raise invalid_field(
            "checkpoint.volume",
            claim,
            f"nothing: the template mounts {first_container_mounts(template)[place]} at {place}",
        )


def to_checkpoint_spec(document: CheckpointDocument) -> CheckpointSpec:
    """The domain's form of it.

    Raises:
        ValueError: the domain refuses what the form let through.
    """
    given = document.volume
    volume = None if given is None else CheckpointVolume(given.persistent_volume_claim.claim_name, given.sub_path or "")
    return CheckpointSpec(document.dir, document.interval, document.keep, volume)


def to_checkpoint_document(checkpoint: CheckpointSpec) -> dict[str, Any]:
    """The document that reads as `checkpoint`, in plain JSON values."""
    document: dict[str, Any] = {"dir": checkpoint.dir, "interval": checkpoint.interval_s, "keep": checkpoint.keep}
    if checkpoint.volume is None:
        return document
    folder = {"subPath": checkpoint.volume.sub_path} if checkpoint.volume.sub_path else {}
    return {**document, "volume": {"persistentVolumeClaim": {"claimName": checkpoint.volume.claim}, **folder}}


def _is_mount_path(path: str) -> bool:
    plain = posixpath.normpath(path)
    return (
        path.startswith("/")
        and ".." not in path.split("/")
        and ":" not in path
        and plain not in ("/", *_RESERVED_PATHS)
    )


_RESERVED_ENV_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
GPUS_MAX = 100_000
COUNT_MAX = 10**15
BATCH_MAX = 1_000_000
SEQUENCE_MAX = 100_000_000


def _check_env_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise PydanticCustomError("env_name", "Input should be letters, digits and _, not beginning with a digit")
    if name in _RESERVED_ENV_NAMES or name.startswith("EBBTIDE_"):
        reserved = ", ".join(_RESERVED_ENV_NAMES)
        raise PydanticCustomError(
            "env_name", "Input should be a name Ebbtide does not set itself: EBBTIDE_*, " + reserved
        )
    return name


def require_finite_json(profile: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(profile, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise PydanticCustomError("profile", "Input should be a JSON object of finite numbers") from None
    return profile


def _validate_pod_template(template: dict[str, Any]) -> dict[str, Any]:
    template = strip_nulls(require_finite_json(template))  # as the API server reads them
    check_template(template)
    return template


EnvName = Annotated[str, AfterValidator(_check_env_name)]
Count = Annotated[int, Field(strict=True, ge=1, le=COUNT_MAX)]
Batch = Annotated[int, Field(strict=True, ge=1, le=BATCH_MAX)]
SequenceLength = Annotated[int, Field(strict=True, ge=1, le=SEQUENCE_MAX)]
Priority = Annotated[int, Field(strict=True, ge=-1000, le=1000)]
GpuCount = Annotated[int, Field(strict=True, ge=1, le=GPUS_MAX)]


class GpuRange(Document):
    """How many GPUs the job takes: at least `min`, at most `max`. Equal ones make it inelastic."""

    model_config = CAMEL_CASE
    min: GpuCount
    max: GpuCount

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max < self.min:
            raise invalid_field("max", self.max, f"at least gpus.min, which is {self.min}")
        return self


class JobDocument(Document):
    """A job as its owner writes it. Durations are seconds or text such as "5m"; `deadline` counts from submission."""

    model_config = CAMEL_CASE
    name: Label
    gpus: GpuRange
    queue: Label = "default"
    priority: Priority = 0
    gpu: Text = Field(default="", description="The only GPU model it may run on; empty: any.")
    model: Text = Field(default="", description="A model preset that the solver knows.")
    profile: Annotated[dict[str, Any], AfterValidator(require_finite_json)] | None = Field(
        default=None, description="A model profile of the user's own, instead of `model`."
    )
    global_batch: Batch | None = None
    sequence_length: SequenceLength | None = None
    steps: Count | None = Field(default=None, description="Optimizer steps; absent: the length is unknown.")
    duration_estimate: PositiveDuration | None = None
    deadline: PositiveDuration | None = None
    max_run_time: PositiveDuration | None = None
    retries: Annotated[int, Field(strict=True, ge=0, le=1000)] = 3
    command: Annotated[list[Text], Field(max_length=1000)] = Field(default_factory=list)
    image: Text = ""
    env: dict[EnvName, Text] = Field(default_factory=dict)
    checkpoint: CheckpointDocument = Field(default_factory=CheckpointDocument)
    fungible: Annotated[bool, Field(strict=True)] = True
    namespace: Label | Literal[""] = Field(
        default="", description="Kubernetes namespace of its pods; empty: the default."
    )
    template: Annotated[dict[str, Any], AfterValidator(_validate_pod_template)] | None = Field(
        default=None, description="Pod template on Kubernetes; its first container runs `command`, or else its own."
    )

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.model and self.profile is not None:
            raise invalid_field("profile", self.profile, "either model or profile, not both")
        if (self.model or self.profile is not None) and self.global_batch is None:
            raise invalid_field("globalBatch", None, "at least 1: a job with a model or a profile needs it")
        return self

    @model_validator(mode="after")
    def _check_mounts(self) -> Self:
        if self.template is not None:
            check_checkpoint_mount(self.checkpoint, self.template)
        return self


def to_job_spec(document: JobDocument) -> JobSpec:
    """The domain's form of a job document.

    Raises:
        RefusedError: the domain refuses what the form let through.
    """
    template = document.template
    command = tuple(document.command) or (template_command(template) if template is not None else ())
    image = document.image or (template_image(template) if template is not None else "")
    try:
        return JobSpec(
            name=document.name,
            min_gpus=document.gpus.min,
            max_gpus=document.gpus.max,
            queue=document.queue,
            priority=document.priority,
            gpu=document.gpu,
            model=document.model,
            profile_json=_canonical_json(document.profile),
            global_batch=document.global_batch or 0,
            sequence_length=document.sequence_length or 0,
            steps=document.steps or 0,
            duration_estimate_s=document.duration_estimate,
            deadline_s=document.deadline,
            run_time_s_max=document.max_run_time,
            retries=document.retries,
            command=command,
            image=image,
            env=dict(document.env),
            checkpoint=to_checkpoint_spec(document.checkpoint),
            fungible=document.fungible,
            namespace=document.namespace,
            template_json=_canonical_json(template),
        )
    except ValueError as refused:
        raise InvalidDocumentError(InvalidField("document", to_printable(document.name), str(refused))) from None


def _canonical_json(document: dict[str, Any] | None) -> str:
    return "" if document is None else json.dumps(document, sort_keys=True, separators=(",", ":"))


def parse_job(document: object) -> JobSpec:
    """A job document of plain JSON or YAML values as the domain's JobSpec.

    Raises:
        RefusedError: fields are refused; the message names each with its value and what is allowed.
    """
    return to_job_spec(parse_document(JobDocument, document))


def to_job_document(spec: JobSpec) -> dict[str, Any]:
    """The document that `read_job` would read as `spec`, in plain JSON values; absent options are left out."""
    document = {
        "name": spec.name,
        "gpus": {"min": spec.min_gpus, "max": spec.max_gpus},
        "queue": spec.queue,
        "priority": spec.priority,
        "gpu": spec.gpu or None,
        "model": spec.model or None,
        "profile": json.loads(spec.profile_json) if spec.profile_json else None,
        "globalBatch": spec.global_batch or None,
        "sequenceLength": spec.sequence_length or None,
        "steps": spec.steps or None,
        "durationEstimate": spec.duration_estimate_s,
        "deadline": spec.deadline_s,
        "maxRunTime": spec.run_time_s_max,
        "retries": spec.retries,
        "command": list(spec.command),
        "image": spec.image or None,
        "env": dict(spec.env),
        "checkpoint": to_checkpoint_document(spec.checkpoint),
        "fungible": spec.fungible,
        "namespace": spec.namespace or None,
        "template": json.loads(spec.template_json) if spec.template_json else None,
    }
    return {name: value for name, value in document.items() if value is not None}
