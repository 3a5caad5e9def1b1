"""The job document: the form of a job for REST, the command line and the ElasticJob custom resource."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.checkpoint import (
    CheckpointDocument,
    check_checkpoint_mount,
    check_trainer_location,
    to_checkpoint_document,
    to_checkpoint_spec,
)
from scheduler.documents.document import (
    CAMEL_CASE,
    LABEL_FORM,
    Document,
    InvalidDocumentError,
    InvalidField,
    Label,
    Text,
    invalid_field,
    parse_document,
    to_printable,
)
from scheduler.documents.job_framework import check_framework
from scheduler.documents.job_labels import JobLabels
from scheduler.documents.job_resources import (
    JobResourcesDocument,
    check_resources,
    to_job_resources,
    to_resources_document,
)
from scheduler.documents.job_secrets import (
    SecretDocument,
    check_secrets,
    to_secret_documents,
    to_secret_references,
)
from scheduler.documents.plan_limits import JobPlanDocument, to_plan_document, to_plan_limits
from scheduler.documents.pod_template import (
    RESERVED_VARIABLE_FORM,
    check_template,
    is_reserved_variable,
    strip_nulls,
    template_command,
    template_image,
)
from scheduler.documents.units import HangTimeout, PositiveDuration
from scheduler.domain.checkpoints import DEFAULT_CHECKPOINT
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_labels import LABELS_MAX, RESERVED_DOMAIN, merge_labels
from scheduler.domain.job_spec import HANG_TIMEOUT_S, JobSpec
from scheduler.domain.pod_requirements import PER_GPU
from scheduler.domain.program import DIGEST_FORM, Program, find_digest_problem, find_setup_problem, find_venv_problem
from scheduler.domain.run_document import LaunchMode


def _check_digest(digest: str) -> str:
    if find_digest_problem(digest):
        raise PydanticCustomError("digest", "Input should be {form}", {"form": DIGEST_FORM})
    return digest


ArchiveDigest = Annotated[str, AfterValidator(_check_digest)]


_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
GPUS_MAX = 100_000
COUNT_MAX = 10**15
BATCH_MAX = 1_000_000
SEQUENCE_MAX = 100_000_000


def _check_env_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise PydanticCustomError("env_name", "Input should be letters, digits and _, not starting with a digit")
    if is_reserved_variable(name):
        raise PydanticCustomError("env_name", "Input should be {form}", {"form": RESERVED_VARIABLE_FORM})
    return name


def require_finite_json(profile: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(profile, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise PydanticCustomError("profile", "Input should be a JSON object of finite numbers") from None
    return profile


def _validate_pod_template(template: dict[str, Any]) -> dict[str, Any]:
    template = strip_nulls(require_finite_json(template))  # as the API server does
    check_template(template)
    return template


EnvName = Annotated[str, AfterValidator(_check_env_name)]
Count = Annotated[int, Field(strict=True, ge=1, le=COUNT_MAX)]
Batch = Annotated[int, Field(strict=True, ge=1, le=BATCH_MAX)]
SequenceLength = Annotated[int, Field(strict=True, ge=1, le=SEQUENCE_MAX)]
Priority = Annotated[int, Field(strict=True, ge=-1000, le=1000)]
RelativeSpeed = Annotated[float, Field(strict=True, gt=0, le=1_000_000, allow_inf_nan=False)]
GpuCount = Annotated[int, Field(strict=True, ge=1, le=GPUS_MAX)]
SampleTokens = Annotated[int, Field(ge=1, le=SEQUENCE_MAX)]
LENGTHS_MAX = 256
SECRETS_MAX = 100


class GpuRange(Document):
    """Number of GPUs that the job accepts. If `min` equals `max`, the job is not elastic."""

    model_config = CAMEL_CASE
    min: GpuCount = Field(description="Fewest GPUs that the job can run on. It is pending below this number.")
    max: GpuCount = Field(description="Most GPUs that the job can use, at least `min`.")
    mix: Literal["allow", "never"] = Field(
        default="allow",
        description="Whether the job may hold GPUs of several models at once, where a plan is faster. Jobs without "
        "`model` or `profile`, or with `gpu`, never do.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_number(cls, document: Any) -> Any:
        if isinstance(document, int) and not isinstance(document, bool):
            form = f"an object with a range, such as {{min: {document}, max: {document}}}"
            raise PydanticCustomError("gpu_range", "{form}", {"form": form})
        return document

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max < self.min:
            raise invalid_field("max", self.max, f"at least gpus.min, which is {self.min}")
        return self


class WorkdirDocument(Document):
    """The user's code. Every rank starts in a copy of this folder."""

    archive: ArchiveDigest = Field(
        description=f"Digest of an uploaded archive (`PUT /v1/archives/{{digest}}`): {DIGEST_FORM}. "
        "`ebbtide submit --workdir DIR` packs and uploads one."
    )


class JobDocument(Document):
    """A job as its owner writes it. Durations are seconds or text such as "5m"."""

    model_config = CAMEL_CASE
    name: Label = Field(description=f"Name of the job: {LABEL_FORM}.")
    gpus: GpuRange = Field(description="Range of GPUs that the job can run on.")
    queue: Label = Field(default="default", description="Queue whose GPU quota the job uses.")
    priority: Priority = Field(
        default=0, description="Priority within the queue, -1000 to 1000. Higher values are scheduled first."
    )
    gpu: Text = Field(
        default="", description="GPU model that the job requires, as a profile name such as h100-80g. Empty: any model."
    )
    model: Text = Field(
        default="", description="Name of a built-in model profile, from which plans are computed. Empty: none."
    )
    profile: Annotated[dict[str, Any], AfterValidator(require_finite_json)] | None = Field(
        default=None,
        description="A model profile of your own or a Hugging Face `config.json`, instead of `model`. Default: none.",
    )
    global_batch: Batch | None = Field(
        default=None, description="Samples per optimizer step. Required with `model` or `profile`."
    )
    sequence_length: SequenceLength | None = Field(
        default=None, description="Tokens per sample. Default: that of the model."
    )
    framework: Text = Field(
        default="",
        description="Training framework that runs the job's plans: `megatron-lm`, `deepspeed`, `torchtitan`, "
        "`accelerate`, `galvatron`, `colossalai` or `llama-factory`. The job gets only plans that it can run, and "
        "`command` takes them with placeholders such as `{plan.args}` and `{plan.file}`. Requires `model` or "
        "`profile`. Empty: none.",
    )
    steps: Count | None = Field(default=None, description="Number of optimizer steps. Default: unknown.")
    duration_estimate: PositiveDuration | None = Field(
        default=None,
        description="Expected run time on `gpus.min` GPUs, in seconds or as text such as 8h. Used to order jobs.",
    )
    deadline: PositiveDuration | None = Field(
        default=None,
        description="Time from submission to the end at the latest, in seconds or as text such as 2d. Default: none.",
    )
    max_run_time: PositiveDuration | None = Field(
        default=None,
        description="Limit of the time from the first start, in seconds or as text such as 12h. Default: none.",
    )
    retries: Annotated[int, Field(strict=True, ge=0, le=1000)] = Field(
        default=3, description="Number of failed runs that are retried. Runs lost with their node do not count."
    )
    hang_timeout: HangTimeout = Field(
        default=HANG_TIMEOUT_S,
        description="Time without progress after which a run is restarted, in seconds or as text such as 5m, or "
        "`never`. Default: 30 s.",
    )
    command: Annotated[list[Text], Field(max_length=1000)] = Field(
        default_factory=list,
        description="Command of each rank, with its arguments. Required to run, unless `image` or `template` has one.",
    )
    launch: LaunchMode = Field(
        default=LaunchMode.RANK,
        description="`rank` starts the command once per GPU. `node` starts it once per node, for launchers such as "
        "torchrun; `{nnodes}`, `{node_rank}`, `{nproc_per_node}`, `{master_addr}` and `{master_port}` in its arguments "
        "are replaced.",
    )
    workdir: WorkdirDocument | None = Field(
        default=None, description="Folder in which every rank starts. Default: one that the executor chooses."
    )
    setup: Annotated[list[Text], Field(max_length=100)] = Field(
        default_factory=list,
        description="Command that runs once per machine in `workdir`, before any rank, such as an installation of "
        "packages. Default: none.",
    )
    venv: Text = Field(
        default="",
        description="Virtual environment whose `python` the command uses: an absolute path on the machines, or a path "
        "in `workdir` that `setup` creates. Empty: the PATH of the machine.",
    )
    image: Text = Field(
        default="",
        description="Container image of the job's pods on Kubernetes, which needs nothing of Ebbtide. Empty: that of "
        "`template`, or the worker image.",
    )
    env: dict[EnvName, Text] = Field(default_factory=dict, description="Environment variables of each rank.")
    labels: JobLabels = Field(
        default_factory=dict,
        description=f"Labels to find the job by, such as `{{team: vision}}`, by the rules of Kubernetes: at most "
        f"{LABELS_MAX}. The prefix `{RESERVED_DOMAIN}/` is reserved.",
    )
    secrets: Annotated[list[SecretDocument], Field(max_length=SECRETS_MAX)] = Field(
        default_factory=list,
        description="Secrets that each rank gets as an environment variable or a file, by reference. Default: none.",
    )
    checkpoint: CheckpointDocument = Field(
        default_factory=CheckpointDocument, description="Location, interval and number of checkpoints."
    )
    fungible: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="Whether the job can run on nodes on loan from inference pools. Never without a resize: see "
        "`onResize`.",
    )
    on_resize: OnResize | None = Field(
        default=None,
        description="What a resize does to the job. `checkpoint`: it saves and resumes. `restart`: it starts again "
        "from its last reported checkpoint, else from step 0. `never`: its GPUs do not change after its start, and it "
        "does not run on lent nodes. Default: `checkpoint` for a job that declares `checkpoint` or reports its "
        "progress, else `never`.",
    )
    speeds: Annotated[dict[Text, RelativeSpeed], Field(max_length=100)] = Field(
        default_factory=dict,
        description="Relative speed of one GPU by model, such as `{a100-80g: 1, t4: 0.18}`, for a job without `model` "
        "or `profile`. Default: as measured on each model that the job ran on, else by the GPU profiles.",
    )
    lengths: Annotated[dict[SampleTokens, Count], Field(max_length=LENGTHS_MAX)] | None = Field(
        default=None,
        description="Distribution of the lengths of samples, for a job with `model` or `profile`: number of samples by "
        "tokens, such as `{512: 90, 8192: 10}`. `ebbtide submit --lengths FILE` makes it from a file. Default: all "
        "samples have `sequenceLength`.",
    )
    plan: JobPlanDocument | None = Field(
        default=None,
        description="Limits of the parallel plans, for a job with `model` or `profile` and without `lengths`. Default: "
        "none.",
    )
    namespace: Label | Literal[""] = Field(
        default="", description="Kubernetes namespace of the job's pods. Empty: the operator's default."
    )
    template: Annotated[dict[str, Any], AfterValidator(_validate_pod_template)] | None = Field(
        default=None,
        description="Pod template on Kubernetes. Its first container runs `command`, or its own command by default.",
    )
    resources: JobResourcesDocument | None = Field(
        default=None, description="Memory and cores that the job may use on each node, or for each GPU."
    )
    resources_per: Literal["gpu", "pod"] = Field(
        default="pod",
        description="What `resources` and the resources of the template's first container are for: `pod`, all GPUs of "
        "the job on a node, or `gpu`, which multiplies them by their number.",
    )

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.model and self.profile is not None:
            raise invalid_field("profile", self.profile, "either model or profile, not both")
        if self.speeds and (self.model or self.profile is not None):
            raise invalid_field("speeds", self.speeds, "nothing; the plans of a model or profile determine its speed")
        if self.lengths is not None and not self.lengths:
            raise invalid_field("lengths", self.lengths, "at least one length; omit it for samples of equal length")
        if self.lengths and not self.model and self.profile is None:
            raise invalid_field("lengths", self.lengths, "nothing; only plans of a model or profile depend on lengths")
        if self.plan is not None and not self.model and self.profile is None:
            raise invalid_field("plan", None, "nothing; only jobs with a model or profile have plans to limit")
        if self.plan is not None and self.lengths:
            raise invalid_field("plan", None, "nothing; it cannot be combined with lengths")
        if (self.model or self.profile is not None) and self.global_batch is None:
            raise invalid_field("globalBatch", None, "at least 1: a job with a model or a profile needs it")
        return self

    @model_validator(mode="after")
    def _check_framework(self) -> Self:
        template = () if self.template is None else template_command(self.template)
        check_framework(
            self.framework,
            has_model=bool(self.model or self.profile is not None),
            has_lengths=bool(self.lengths),
            command=self.command or list(template),
        )
        return self

    @model_validator(mode="after")
    def _check_program(self) -> Self:
        archive = "" if self.workdir is None else self.workdir.archive
        if problem := find_setup_problem(tuple(self.setup), archive=archive):
            raise invalid_field("setup", self.setup, problem)
        if problem := find_venv_problem(self.venv, has_setup=bool(self.setup)):
            raise invalid_field("venv", self.venv, problem)
        return self

    @model_validator(mode="after")
    def _check_secrets(self) -> Self:
        for number, secret in enumerate(self.secrets):
            if secret.env:
                try:
                    _check_env_name(secret.env)
                except PydanticCustomError as error:
                    allowed = str(error).removeprefix("Input should be ")
                    raise invalid_field(f"secrets.{number}.env", secret.env, allowed) from None
        check_secrets(self.secrets, self.env)
        return self

    @model_validator(mode="after")
    def _check_resources(self) -> Self:
        check_resources(self.resources, self.template)
        return self

    @model_validator(mode="after")
    def _check_checkpoints(self) -> Self:
        command = self.command
        if self.template is not None:
            check_checkpoint_mount(self.checkpoint, self.template)
            command = command or list(template_command(self.template))
        check_trainer_location(self.checkpoint, command)
        return self


def to_job_spec(document: JobDocument) -> JobSpec:
    """Convert a job document.

    Raises:
        InvalidDocumentError: jobSpec rejects a value.
    """
    template = document.template
    command = tuple(document.command) or (template_command(template) if template is not None else ())
    image = document.image or (template_image(template) if template is not None else "")
    try:
        return JobSpec(
            name=document.name,
            min_gpus=document.gpus.min,
            max_gpus=document.gpus.max,
            mixes_gpu_models=document.gpus.mix == "allow",
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
            hang_timeout_s=document.hang_timeout,
            command=command,
            image=image,
            env=dict(document.env),
            labels=merge_labels({}, document.labels),
            checkpoint=to_checkpoint_spec(document.checkpoint),
            fungible=document.fungible,
            on_resize=document.on_resize or _derive_on_resize(document.checkpoint),
            speeds=dict(document.speeds),
            lengths=tuple(sorted((document.lengths or {}).items())),
            plan_limits=to_plan_limits(document.plan),
            plan_simplicity=0.0 if document.plan is None else document.plan.simplicity,
            namespace=document.namespace,
            template_json=_canonical_json(template),
            framework=document.framework,
            resources=to_job_resources(document.resources),
            resources_per=PER_GPU if document.resources_per == PER_GPU else "",
            program=_to_program(document),
        )
    except ValueError as error:
        raise InvalidDocumentError(InvalidField("document", to_printable(document.name), str(error))) from None


def _to_program(document: JobDocument) -> Program:
    return Program(
        archive="" if document.workdir is None else document.workdir.archive,
        setup=tuple(document.setup),
        venv=document.venv,
        launch=document.launch,
        secrets=to_secret_references(document.secrets),
    )


def _derive_on_resize(checkpoint: CheckpointDocument) -> OnResize | None:
    """Return CHECKPOINT if the document declares checkpoints.

    A copy of a job that declares none has all defaults filled in, which is no declaration.
    """
    given = checkpoint.model_fields_set
    is_filled_in = given >= {"dir", "interval", "keep"} and to_checkpoint_spec(checkpoint) == DEFAULT_CHECKPOINT
    return OnResize.CHECKPOINT if given and not is_filled_in else None


def _canonical_json(document: dict[str, Any] | None) -> str:
    return "" if document is None else json.dumps(document, sort_keys=True, separators=(",", ":"))


def parse_job(document: object) -> JobSpec:
    """Parse a job document of plain JSON or YAML values.

    Raises:
        InvalidDocumentError: fields are invalid. The message names each with its value and the allowed values.
    """
    return to_job_spec(parse_document(JobDocument, document))


def require_command(spec: JobSpec) -> None:
    """Check that the job has something to run: a command, or an image or pod template with an entry point.

    Raises:
        InvalidDocumentError: it has none of them.
    """
    if not (spec.command or spec.image or spec.template_json):
        raise InvalidDocumentError(
            InvalidField("command", None, "at least one word, such as `python train.py`; only an image can replace it")
        )


def to_job_document(spec: JobSpec) -> dict[str, Any]:
    """Return the document of `spec`, in plain JSON values, without unset options."""
    document = {
        "name": spec.name,
        "gpus": {"min": spec.min_gpus, "max": spec.max_gpus, **({} if spec.mixes_gpu_models else {"mix": "never"})},
        "queue": spec.queue,
        "priority": spec.priority,
        "gpu": spec.gpu or None,
        "model": spec.model or None,
        "profile": json.loads(spec.profile_json) if spec.profile_json else None,
        "globalBatch": spec.global_batch or None,
        "sequenceLength": spec.sequence_length or None,
        "framework": spec.framework or None,
        "steps": spec.steps or None,
        "durationEstimate": spec.duration_estimate_s,
        "deadline": spec.deadline_s,
        "maxRunTime": spec.run_time_s_max,
        "retries": spec.retries,
        "hangTimeout": "never" if spec.hang_timeout_s is None else spec.hang_timeout_s,
        "command": list(spec.command),
        "launch": spec.program.launch.value if spec.program.launch is not LaunchMode.RANK else None,
        "workdir": {"archive": spec.program.archive} if spec.program.archive else None,
        "setup": list(spec.program.setup) or None,
        "venv": spec.program.venv or None,
        "image": spec.image or None,
        "env": dict(spec.env),
        "labels": dict(spec.labels) or None,
        "secrets": to_secret_documents(spec.program.secrets) or None,
        "checkpoint": to_checkpoint_document(spec.checkpoint),
        "onResize": None if spec.on_resize is None else spec.on_resize.value,
        "fungible": spec.fungible,
        "speeds": dict(spec.speeds) or None,
        "lengths": {str(tokens): samples for tokens, samples in spec.lengths} or None,
        "plan": to_plan_document(spec.plan_limits, spec.plan_simplicity),
        "namespace": spec.namespace or None,
        "template": json.loads(spec.template_json) if spec.template_json else None,
        "resources": to_resources_document(spec.resources),
        "resourcesPer": spec.resources_per or None,
    }
    return {name: value for name, value in document.items() if value is not None}
