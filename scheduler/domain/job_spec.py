"""JobSpec: the specification of a job that a user submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.domain.checkpoints import DEFAULT_CHECKPOINT, CheckpointSpec
from scheduler.domain.framework_limits import FRAMEWORK_LIMITS, combine_framework_limits
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_labels import find_label_problem
from scheduler.domain.job_resources import NO_RESOURCES, JobResources
from scheduler.domain.plan_limits import NO_LIMITS, PlanLimits
from scheduler.domain.pod_requirements import PER_GPU, PodRequirements, parse_requirements
from scheduler.domain.program import DEFAULT_PROGRAM, Program
from scheduler.domain.run_document import ResourceLimits
from scheduler.domain.scaling_curve import (
    LINEAR_CURVE_KEY,
    CurveRequest,
    LengthHistogram,
    check_length_histogram,
    curve_key,
    name_model,
)

HANG_TIMEOUT_S = 30.0
"""Time without progress after which a run counts as hung, unless its job sets another one."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Specification of a job. `steps` 0 means that the length is unknown. An empty `gpu` allows every GPU model.

    `framework` names the training framework in whose words the command gets each plan; plans are those that it can run.
    A job with a model may hold GPUs of several models at once, unless `mixes_gpu_models` is false. `speeds` is the
    owner's table of relative speeds by GPU model, only for jobs without a model. `lengths` is the distribution of the
    lengths of samples, only for jobs with a model; empty for equal lengths. Without `on_resize`, `Job.resize_mode`
    follows. `program` is the user's code besides `command`. With `hang_timeout_s` None, a run never counts as hung.
    `plan_limits` and `plan_simplicity` restrict the plans of a job with a model whose samples have equal lengths.
    Users find jobs by `labels`; no decision depends on them.

    On Kubernetes, pods run in `namespace` (empty: the operator's default) and are created from the pod template
    `template_json`, if there is one. `resources` and those of its first container are for all GPUs on a node, or for
    each of them if `resources_per` is `gpu`. `resource_uid` is the uid of the custom resource that submitted the job.
    """

    name: str
    min_gpus: int
    max_gpus: int
    queue: str = "default"
    priority: int = 0
    gpu: str = ""
    model: str = ""
    profile_json: str = ""
    global_batch: int = 0
    sequence_length: int = 0
    steps: int = 0
    duration_estimate_s: float | None = None
    deadline_s: float | None = None
    run_time_s_max: float | None = None
    retries: int = 3
    hang_timeout_s: float | None = HANG_TIMEOUT_S
    command: tuple[str, ...] = ()
    image: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    checkpoint: CheckpointSpec = DEFAULT_CHECKPOINT
    fungible: bool = True
    mixes_gpu_models: bool = True
    speeds: Mapping[str, float] = field(default_factory=dict)
    lengths: LengthHistogram = ()
    namespace: str = ""
    template_json: str = ""
    resource_uid: str = ""
    on_resize: OnResize | None = None
    program: Program = DEFAULT_PROGRAM
    resources: JobResources = NO_RESOURCES
    resources_per: str = ""
    plan_limits: PlanLimits = NO_LIMITS
    plan_simplicity: float = 0.0
    framework: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.min_gpus < 1:
            raise ValueError(f"gpus.min must be at least 1, got {self.min_gpus}")
        if self.max_gpus < self.min_gpus:
            raise ValueError(f"gpus.max must be at least gpus.min ({self.min_gpus}), got {self.max_gpus}")
        if self.model and self.profile_json:
            raise ValueError("model and profile are mutually exclusive; set one of them")
        if self.has_profile and self.global_batch < 1:
            raise ValueError(
                f"globalBatch must be at least 1 for a job with a model or profile, got {self.global_batch}"
            )
        if self.speeds and self.has_profile:
            raise ValueError("speeds applies to jobs without model or profile only; remove it")
        for gpu, speed in self.speeds.items():
            if not 0 < speed < float("inf"):
                raise ValueError(f"speeds.{gpu} must be a finite number above 0, got {speed}")
        if self.lengths and not self.has_profile:
            raise ValueError("lengths applies to jobs with model or profile only; remove it")
        check_length_histogram(self.lengths)
        if self.framework and (not self.has_profile or self.lengths):
            raise ValueError("framework applies to jobs with model or profile, and without lengths, only; remove it")
        if self.framework and self.framework not in FRAMEWORK_LIMITS:
            raise ValueError(f"framework must be one of {', '.join(FRAMEWORK_LIMITS)}, got {self.framework!r}")
        if not self.has_profile and (self.plan_limits != NO_LIMITS or self.plan_simplicity):
            raise ValueError("plan applies to jobs with model or profile only; remove it")
        if self.lengths and (self.plan_limits != NO_LIMITS or self.plan_simplicity):
            raise ValueError("plan applies to jobs whose samples have equal lengths only; remove it or lengths")
        if not 0 <= self.plan_simplicity <= 1:
            raise ValueError(f"plan.simplicity must be between 0 and 1, got {self.plan_simplicity}")
        for name in ("steps", "retries", "global_batch", "sequence_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("duration_estimate_s", "deadline_s", "run_time_s_max", "hang_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number of seconds above 0, got {value}")
        if problem := find_label_problem(self.labels):
            raise ValueError(f"label {problem.key!r}: got {problem.value!r}; allowed: {problem.allowed}")

    @property
    def has_profile(self) -> bool:
        return bool(self.model or self.profile_json)

    @property
    def model_label(self) -> str:
        """The model that the job trains, or a short digest of its own profile. Empty: the job states neither."""
        return name_model(self.model, self.profile_json) if self.has_profile else ""

    @property
    def pod_template_json(self) -> str:
        """The pod template with the job's resources; empty for a job with neither."""
        return self.resources.add_to_template(self.template_json)

    @property
    def pod_requirements(self) -> PodRequirements:
        """Requirements of the job's pods on a node of Kubernetes."""
        volume = self.checkpoint.volume
        return parse_requirements(self.pod_template_json, self.resources_per, "" if volume is None else volume.claim)

    def limit_node(self, gpus: int) -> ResourceLimits:
        """Return what the job may use on a node where it holds this many GPUs."""
        return self.resources.limit_node(gpus if self.resources_per == PER_GPU else 1)

    @property
    def may_mix_gpu_models(self) -> bool:
        """Whether plans for GPUs of several models can exist: only with a model, and for samples of equal length."""
        is_bound = bool(self.gpu or self.lengths or self.framework)
        return self.has_profile and self.mixes_gpu_models and not is_bound

    @property
    def search_limits(self) -> PlanLimits:
        """The limits of the job's plans: those of its owner, and of what its framework can run."""
        return combine_framework_limits(self.framework, self.plan_limits)

    @property
    def is_elastic(self) -> bool:
        return self.max_gpus > self.min_gpus

    @property
    def curve_request(self) -> CurveRequest | None:
        """The curve to solve for this job as submitted, or None if it scales by data parallelism only."""
        if not self.has_profile:
            return None
        return CurveRequest(
            self.model,
            self.profile_json,
            self.global_batch,
            self.sequence_length,
            lengths=self.lengths,
            limits=self.search_limits,
            simplicity=self.plan_simplicity,
        )

    @property
    def curve_key(self) -> str:
        if not self.has_profile:
            return LINEAR_CURVE_KEY
        return curve_key(
            self.model,
            self.profile_json,
            self.global_batch,
            self.sequence_length,
            lengths=self.lengths,
            limits=self.search_limits,
            simplicity=self.plan_simplicity,
        )
