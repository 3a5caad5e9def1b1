"""Job: what a user asked for (JobSpec), where it stands (Job), and what it has had so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from scheduler.domain.allocation import EMPTY_ALLOCATION, Allocation
from scheduler.domain.job_state import ENDED, JOB_EDGES, PLACED, WAITING, JobState
from scheduler.domain.scaling_curve import LINEAR_CURVE_KEY, CurveRequest, curve_key


class Intent(StrEnum):
    """What the owner wants of the job."""

    RUN = "run"
    SUSPEND = "suspend"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Where checkpoints go (empty: a folder that the executor chooses), how often, how many are kept."""

    dir: str = ""
    interval_s: float = 900.0
    keep: int = 2

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ValueError(f"checkpoint.interval must be above 0 s, got {self.interval_s}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {self.keep}")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a user asked for. `steps` 0 means that the length is unknown; `gpu` empty means any model of GPU."""

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
    command: tuple[str, ...] = ()
    image: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    fungible: bool = True

    def __post_init__(self) -> None:
        if self.min_gpus < 1:
            raise ValueError(f"gpus.min must be at least 1, got {self.min_gpus}")
        if self.max_gpus < self.min_gpus:
            raise ValueError(f"gpus.max must be at least gpus.min = {self.min_gpus}, got {self.max_gpus}")
        if self.model and self.profile_json:
            raise ValueError("model and profile exclude each other: give one of them")
        if self.has_profile and self.global_batch < 1:
            raise ValueError(f"globalBatch must be at least 1 for a job with a model, got {self.global_batch}")
        for name in ("steps", "retries", "global_batch", "sequence_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("duration_estimate_s", "deadline_s", "run_time_s_max"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, got {value}")

    @property
    def has_profile(self) -> bool:
        return bool(self.model or self.profile_json)

    @property
    def is_elastic(self) -> bool:
        return self.max_gpus > self.min_gpus

    @property
    def curve_request(self) -> CurveRequest | None:
        """What to solve for this job; None when it is elastic by data parallelism alone."""
        if not self.has_profile:
            return None
        return CurveRequest(self.model, self.profile_json, self.global_batch, self.sequence_length)

    @property
    def curve_key(self) -> str:
        if not self.has_profile:
            return LINEAR_CURVE_KEY
        return curve_key(self.model, self.profile_json, self.global_batch, self.sequence_length)


@dataclass(frozen=True, slots=True)
class Progress:
    """Work done, as of `at_s`; between two observations it is extrapolated, never rewritten.

    `checkpoint_steps` is what a crash would fall back to. `correction` scales the curve's step times to what
    was measured of this job (CurveCorrection). `loss` is the last reported one.
    """

    at_s: float
    steps: float = 0.0
    checkpoint_steps: float = 0.0
    checkpoint_at_s: float = 0.0
    correction: float = 1.0
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class JobAccount:
    """What the job has had and cost so far, settled at each change of state or allocation."""

    waited_s: float = 0.0
    gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    failures: int = 0
    preemptions: int = 0
    resizes: int = 0
    first_started_at_s: float | None = None
    settled_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    spec: JobSpec
    state: JobState
    submitted_at_s: float
    state_since_s: float
    progress: Progress
    account: JobAccount = field(default_factory=JobAccount)
    allocation: Allocation = EMPTY_ALLOCATION
    intent: Intent = Intent.RUN
    message: str = ""

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_placed(self) -> bool:
        """It has GPUs to run on now: starting, running or resizing."""
        return self.state in PLACED

    def step_time_s(self) -> float:
        """Seconds a step under the current plan, as measured so far; infinite while it does not run."""
        if self.state is not JobState.RUNNING or self.allocation.plan is None:
            return float("inf")
        return self.allocation.plan.iteration_time_s * self.progress.correction

    def steps_at(self, now_s: float) -> float:
        """Steps done at `now_s`, extrapolated from the last settled figure and capped at the job's length."""
        done = self.progress.steps
        if self.state is JobState.RUNNING:
            done += max(0.0, now_s - self.progress.at_s) / self.step_time_s()
        return min(done, float(self.spec.steps)) if self.spec.steps else done

    def remaining_steps(self, now_s: float) -> float | None:
        """None where the length is unknown."""
        return max(0.0, self.spec.steps - self.steps_at(now_s)) if self.spec.steps else None

    def moved(self, state: JobState, now_s: float, *, message: str = "") -> Job:
        """The job in its next state, with the old state's time settled.

        Raises:
            ValueError: the table of job edges does not know the step.
        """
        if (self.state, state) not in JOB_EDGES:
            raise ValueError(f"job {self.id}: no step leads from {self.state} to {state}")
        progress, account = self._settled(now_s)
        return replace(self, state=state, state_since_s=now_s, message=message, progress=progress, account=account)

    def settled(self, now_s: float) -> Job:
        """The same job with progress, waiting time and GPU-seconds brought forward to `now_s`."""
        progress, account = self._settled(now_s)
        return replace(self, progress=progress, account=account)

    def _settled(self, now_s: float) -> tuple[Progress, JobAccount]:
        elapsed_s = max(0.0, now_s - self.account.settled_at_s)
        waits = self.state in WAITING
        account = replace(
            self.account,
            waited_s=self.account.waited_s + (elapsed_s if waits else 0.0),
            gpu_s=self.account.gpu_s + elapsed_s * self.allocation.held_gpus,
            settled_at_s=now_s,
        )
        return replace(self.progress, steps=self.steps_at(now_s), at_s=now_s), account
