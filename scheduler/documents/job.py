"""The job document: one form for REST, the command line and, later, the custom resource; to and from JobSpec."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.checkpoint import CheckpointDocument, check_mount, checkpoint_document, checkpoint_spec
from scheduler.documents.document import Document, read
from scheduler.documents.fields import CAMEL, Label, Text
from scheduler.documents.pod_shape import without_nulls
from scheduler.documents.pod_template import check_template, template_command, template_image
from scheduler.documents.refusal import Refusal, RefusedError, refused_field, shown
from scheduler.documents.units import PositiveDuration
from scheduler.domain.job import JobSpec

_RESERVED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
GPUS_MAX = 100_000
COUNT_MAX = 10**15
BATCH_MAX = 1_000_000
SEQUENCE_MAX = 100_000_000


def _env_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise PydanticCustomError("env_name", "Input should be letters, digits and _, not beginning with a digit")
    if name in _RESERVED or name.startswith("EBBTIDE_"):
        reserved = ", ".join(_RESERVED)
        raise PydanticCustomError(
            "env_name", "Input should be a name Ebbtide does not set itself: EBBTIDE_*, " + reserved
        )
    return name


def finite_json(profile: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(profile, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise PydanticCustomError("profile", "Input should be a JSON object of finite numbers") from None
    return profile


def _pod_template(template: dict[str, Any]) -> dict[str, Any]:
    template = without_nulls(finite_json(template))  # as the API server reads them
    check_template(template)
    return template


EnvName = Annotated[str, AfterValidator(_env_name)]
Count = Annotated[int, Field(strict=True, ge=1, le=COUNT_MAX)]
Batch = Annotated[int, Field(strict=True, ge=1, le=BATCH_MAX)]
SequenceLength = Annotated[int, Field(strict=True, ge=1, le=SEQUENCE_MAX)]
Priority = Annotated[int, Field(strict=True, ge=-1000, le=1000)]
GpuCount = Annotated[int, Field(strict=True, ge=1, le=GPUS_MAX)]


class GpuRange(Document):
    """How many GPUs the job takes: at least `min`, at most `max`. Equal ones make it inelastic."""

    model_config = CAMEL
    min: GpuCount
    max: GpuCount

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise refused_field("max", self.max, f"at least gpus.min, which is {self.min}")
        return self


class JobDocument(Document):
    """A job as its owner writes it. Durations are seconds or text such as "5m"; `deadline` counts from submission."""

    model_config = CAMEL
    name: Label
    gpus: GpuRange
    queue: Label = "default"
    priority: Priority = 0
    gpu: Text = Field(default="", description="The only GPU model it may run on; empty: any.")
    model: Text = Field(default="", description="A model preset that the solver knows.")
    profile: Annotated[dict[str, Any], AfterValidator(finite_json)] | None = Field(
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
    template: Annotated[dict[str, Any], AfterValidator(_pod_template)] | None = Field(
        default=None, description="Pod template on Kubernetes; its first container runs `command`, or else its own."
    )

    @model_validator(mode="after")
    def _model_is_whole(self) -> Self:
        if self.model and self.profile is not None:
            raise refused_field("profile", self.profile, "either model or profile, not both")
        if (self.model or self.profile is not None) and self.global_batch is None:
            raise refused_field("globalBatch", None, "at least 1: a job with a model or a profile needs it")
        return self

    @model_validator(mode="after")
    def _mounts_once(self) -> Self:
        if self.template is not None:
            check_mount(self.checkpoint, self.template)
        return self


def job_spec(document: JobDocument) -> JobSpec:
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
            profile_json=_canonical(document.profile),
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
            checkpoint=checkpoint_spec(document.checkpoint),
            fungible=document.fungible,
            namespace=document.namespace,
            template_json=_canonical(template),
        )
    except ValueError as refused:
        raise RefusedError(Refusal("document", shown(document.name), str(refused))) from None


def _canonical(document: dict[str, Any] | None) -> str:
    return "" if document is None else json.dumps(document, sort_keys=True, separators=(",", ":"))


def read_job(document: object) -> JobSpec:
    """A job document of plain JSON or YAML values as the domain's JobSpec.

    Raises:
        RefusedError: fields are refused; the message names each with its value and what is allowed.
    """
    return job_spec(read(JobDocument, document))


def job_document(spec: JobSpec) -> dict[str, Any]:
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
        "checkpoint": checkpoint_document(spec.checkpoint),
        "fungible": spec.fungible,
        "namespace": spec.namespace or None,
        "template": json.loads(spec.template_json) if spec.template_json else None,
    }
    return {name: value for name, value in document.items() if value is not None}
