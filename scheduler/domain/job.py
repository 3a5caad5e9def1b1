"""Job: the specification that a user submitted, its progress, its usage and its current state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from scheduler.domain.checkpoints import DEFAULT_CHECKPOINT, CheckpointRequest
from scheduler.domain.job_account import JobAccount, OnResize, RunFailure
from scheduler.domain.job_records import (
    NO_FROZEN_LAYERS,
    NO_OOM_FAILURES,
    NO_REPLAN,
    FrozenLayers,
    MemoryRecord,
    Replan,
    SampleSeries,
)
from scheduler.domain.job_records import Progress as Progress
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import (
    ENDED_STATES,
    JOB_TRANSITIONS,
    NO_ALLOCATION,
    PLACED_STATES,
    WAITING_STATES,
    Allocation,
    JobState,
)
from scheduler.domain.learned_constants import NO_CONSTANTS, CurveConstants, LearnedConstants, rebase_correction
from scheduler.domain.owner_ids import derive_owner_id
from scheduler.domain.placement_record import NO_PLACEMENT_RECORD, PlacementRecord
from scheduler.domain.pod_requirements import NOTHING_ADDED, PodRequirements, add_requirements
from scheduler.domain.scaling_curve import LINEAR_CURVE_KEY, CurveRequest

SPEED_MEASUREMENT_S_MIN = 60.0
"""Run time after which the measured speed on the current GPUs is recorded."""
OVERRUN_SHARE = 0.25
"""Expected remaining steps of a job beyond its declared length, as a fraction of the steps done.

If declared lengths are uniformly 0.5 to 1.5 times the true length, the expected fraction is 0.39 at the declared
length, 0.15 at 1.5 times and 0 at twice that length."""


class Intent(StrEnum):
    """State that the job's owner wants."""

    RUN = "run"
    SUSPEND = "suspend"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job. `owner` is the display name of the caller that submitted it, or empty if unknown, and `owner_id`
    the caller's stable id, which jobs of older releases lack. Compare owners by `owner_key`.

    `save_wish` is the last checkpoint request, fulfilled or not. `sampled` is None before the first progress sample.
    `has_no_session` is set once a run of a job that declares checkpoints goes on without a session.
    `failure` is the last failed run. `placement` records what nodes and volumes said about its pods.
    """

    id: str
    spec: JobSpec
    state: JobState
    submitted_at_s: float
    state_since_s: float
    progress: Progress
    account: JobAccount = field(default_factory=JobAccount)
    allocation: Allocation = NO_ALLOCATION
    intent: Intent = Intent.RUN
    message: str = ""
    memory: MemoryRecord = NO_OOM_FAILURES
    freezing: FrozenLayers = NO_FROZEN_LAYERS
    replan: Replan = NO_REPLAN
    owner: str = ""
    save_wish: CheckpointRequest | None = None
    sampled: SampleSeries | None = None
    failure: RunFailure | None = None
    placement: PlacementRecord = NO_PLACEMENT_RECORD
    missing_secrets: tuple[str, ...] = ()
    owner_id: str = ""
    has_no_session: bool = False
    constants: CurveConstants = NO_CONSTANTS

    @property
    def owner_key(self) -> str:
        """The id by which owners are compared. Empty: it has no owner."""
        return self.owner_id or derive_owner_id(self.owner)

    @property
    def resize_mode(self) -> OnResize:
        """What a resize does to the job: as declared, else CHECKPOINT if it declares checkpoints or has reported."""
        if self.spec.on_resize is not None:
            return self.spec.on_resize
        can_resume = self.has_reported or self.spec.checkpoint != DEFAULT_CHECKPOINT
        return OnResize.CHECKPOINT if can_resume else OnResize.NEVER

    @property
    def is_resizable(self) -> bool:
        return self.resize_mode is not OnResize.NEVER and not self.lacks_session

    @property
    def lacks_session(self) -> bool:
        """Whether the job declares checkpoints, but its script has run without a session, so that none was saved."""
        return self.has_no_session and not self.has_reported and self.resize_mode is OnResize.CHECKPOINT

    @property
    def has_reported(self) -> bool:
        """Whether its workers ever reported progress. Records of older versions show it only by their samples."""
        return self.progress.is_reported or self.sampled is not None

    @property
    def has_known_steps(self) -> bool:
        """Whether `progress.steps` is a fact: the job has reported progress, or has never started."""
        return self.has_reported or self.account.first_started_at_s is None

    @property
    def is_fixed(self) -> bool:
        """Whether the job holds GPUs that no resize may change."""
        return self.state in PLACED_STATES and not self.is_resizable

    @property
    def accepts_lent_nodes(self) -> bool:
        """Whether the job may run on nodes that inference can recall, which takes a resize."""
        return self.spec.fungible and self.is_resizable

    @property
    def pending_checkpoint_request(self) -> CheckpointRequest | None:
        """The checkpoint request that the current workers have not fulfilled yet, or None."""
        request = self.save_wish
        if request is None or request.generation != self.allocation.generation:
            return None
        is_fulfilled = request.steps is not None and self.progress.checkpoint_steps >= request.steps
        return None if is_fulfilled else request

    @property
    def curve_key(self) -> str:
        """Key of the curve for the job's memory correction, and the solved frozen layers and learned constants.

        Read very often, so the common case comes first.
        """
        layers, constants = self.freezing.curve_layers, self.constants.curve
        if not layers and not constants and self.memory.percent == 100:
            return self.spec.curve_key
        return self._curve_key(layers, constants)

    @property
    def next_curve_key(self) -> str:
        """Key of the curve for all frozen layers and the newest constants."""
        return self._curve_key(self.freezing.layers, self.constants.newest)

    @property
    def curve_requests(self) -> tuple[CurveRequest, ...]:
        """The curves to solve for this job: its curve, and the next one if that is not current.

        Empty for a job that scales by data parallelism only.
        """
        request, percent = self.spec.curve_request, self.memory.percent
        if request is None:
            return ()
        current, newest = self.constants.curve, self.constants.newest
        curves = dict.fromkeys(((self.freezing.curve_layers, current), (self.freezing.layers, newest)))
        return tuple(
            replace(request, memory_percent=percent, frozen_layers=layers, constants=constants)
            for layers, constants in curves
        )

    @property
    def is_curve_current(self) -> bool:
        """Whether the job's curve is that for all frozen layers and the newest constants."""
        return self.freezing.is_curve_current and self.constants.is_curve_current

    @property
    def needs_new_plan(self) -> bool:
        """Whether the current plan was made for fewer frozen layers or other constants."""
        return self.freezing.needs_new_plan or self.constants.needs_new_plan

    @property
    def curve_correction(self) -> float:
        """Factor for the curve's step times on GPUs, or under a plan, other than the current ones."""
        known, constants = self.freezing.correction, self.constants
        correction = self.progress.correction if known is None or not self.freezing.is_curve_current else known
        if constants.plan == constants.curve:
            return correction
        # The correction is relative to the constants of the plan.
        plan = self.allocation.plan
        return 1.0 if plan is None else rebase_correction(plan, correction, constants.curve)

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def is_placed(self) -> bool:
        """Whether the job has GPUs to run on: starting, running or resizing."""
        return self.state in PLACED_STATES

    @property
    def deadline_at_s(self) -> float:
        """Time of the deadline, which counts from submission. Infinite without a deadline."""
        return self.submitted_at_s + (float("inf") if self.spec.deadline_s is None else self.spec.deadline_s)

    @property
    def retry_at_s(self) -> float:
        """Time before which the job does not start, because of its memory, its pods or a deleted secret, else 0."""
        secrets_s = float("inf") if self.missing_secrets else 0.0
        return max(self.memory.retry_at_s or 0.0, self.placement.retry_at_s or 0.0, secrets_s)

    @property
    def pod_requirements(self) -> PodRequirements:
        """Requirements of the job's pods, with what the API server adds to them."""
        own, review = self.spec.pod_requirements, self.placement.review
        return own if review is None or review.added == NOTHING_ADDED else add_requirements(own, review.added)

    @property
    def awaits_review(self) -> bool:
        """Whether the API server has not accepted the pods of its template yet. Placed jobs started before."""
        if not self.spec.template_json or self.is_placed:
            return False
        return self.placement.review is None or bool(self.placement.review.error)

    def step_time_s(self) -> float:
        """Return seconds per step under the current plan, as measured. Infinite unless the job runs."""
        if self.state is not JobState.RUNNING or self.allocation.plan is None:
            return float("inf")
        return self.allocation.plan.iteration_time_s * self.progress.correction

    def steps_at(self, now_s: float) -> float:
        """Return the steps done at `now_s`, extrapolated from the last update.

        The result exceeds the declared length only if an observation already did.
        """
        done, length = self.progress.steps, self.spec.steps
        if self.state is JobState.RUNNING:
            done += max(0.0, now_s - self.progress.at_s) / self.step_time_s()
        return float(length) if length and done > length >= self.progress.steps else done

    def remaining_steps(self, now_s: float) -> float | None:
        """Return the remaining steps, or None if the length is unknown.

        A job beyond its declared length is expected to need OVERRUN_SHARE of its steps so far.
        """
        if not self.spec.steps:
            return None
        done = self.steps_at(now_s)
        return OVERRUN_SHARE * done if done > self.spec.steps else self.spec.steps - done

    def transition_to(
        self,
        state: JobState,
        now_s: float,
        *,
        message: str = "",
        allocation: Allocation | None = None,
        resizes: int = 0,
        preemptions: int = 0,
    ) -> Job:
        """Return the job in its next state, with usage updated for the time in the old state.

        `allocation` replaces the allocation, if given. `resizes` and `preemptions` are added to the counts.

        Raises:
            ValueError: JOB_TRANSITIONS does not contain this transition.
        """
        if (self.state, state) not in JOB_TRANSITIONS:
            raise ValueError(f"job {self.id}: there is no transition from {self.state} to {state}")
        account = self._advance_account(now_s, resizes, preemptions, starts=state is JobState.STARTING)
        progress = self._advance_progress(now_s, resets_measurements=allocation is not None and bool(allocation.target))
        allocation = self.allocation if allocation is None else allocation
        return self._replace_state(
            state=state, since_s=now_s, progress=progress, account=account, allocation=allocation, message=message
        )

    def with_progress(self, progress: Progress) -> Job:
        return self._replace_state(
            state=self.state,
            since_s=self.state_since_s,
            progress=progress,
            account=self.account,
            allocation=self.allocation,
            message=self.message,
        )

    def with_frozen_layers(self, layers: int, now_s: float) -> Job:
        """Return the job with its first `layers` layers frozen, more than before. Its new speed is not known yet."""
        correction = self.progress.correction if self.spec.has_profile else None
        settled = self.advance_to(now_s)
        progress = settled.progress if self.spec.has_profile else settled.progress.without_measured_gpu_s()
        freezing = self.freezing.with_layers(layers, now_s, correction=correction)
        return replace(settled, progress=progress, freezing=freezing)

    def with_next_curve(self) -> Job:
        """Return the job planned by the curve for all its frozen layers and the newest constants."""
        freezing, constants = self.freezing.with_current_curve(), self.constants.with_current_curve()
        return replace(self, freezing=freezing, constants=constants)

    def with_constants(self, newest: LearnedConstants) -> Job:
        """Return the job with new learned constants. Without a plan it takes their curve at once."""
        if self.allocation.plan is not None:
            return replace(self, constants=replace(self.constants, newest=newest))
        constants = CurveConstants(newest, newest, newest)
        return replace(self, constants=constants, progress=replace(self.progress, correction=1.0))

    def with_new_plan(self, correction: float) -> Job:
        """Return the job under a new plan from its curve, to which `correction` applies."""
        if not self.needs_new_plan:
            return self
        progress = replace(self.progress, correction=correction)
        freezing, constants = self.freezing.with_new_plan(), self.constants.with_new_plan()
        return replace(self, progress=progress, freezing=freezing, constants=constants)

    def advance_to(self, now_s: float) -> Job:
        """Return the job with progress, waiting time and GPU-seconds advanced to `now_s`."""
        return replace(self, progress=self._advance_progress(now_s), account=self._advance_account(now_s))

    def _replace_state(
        self,
        *,
        state: JobState,
        since_s: float,
        progress: Progress,
        account: JobAccount,
        allocation: Allocation,
        message: str,
    ) -> Job:
        """Return the job with the fields that change often. Four times as fast as `replace`."""
        return Job(
            self.id, self.spec, state, self.submitted_at_s, since_s, progress, account, allocation, self.intent,
            message, self.memory, self.freezing, self.replan, self.owner, self.save_wish, self.sampled, self.failure,
            self.placement, self.missing_secrets, self.owner_id, self.has_no_session, self.constants,
        )  # fmt: skip

    def _curve_key(self, frozen_layers: int, constants: LearnedConstants) -> str:
        request = self.spec.curve_request
        if request is None:
            return LINEAR_CURVE_KEY
        percent = self.memory.percent
        return replace(request, memory_percent=percent, frozen_layers=frozen_layers, constants=constants).key

    def _advance_progress(self, now_s: float, *, resets_measurements: bool = False) -> Progress:
        """Advance the progress to `now_s`. Measurements of the current workers are reset if new ones start."""
        old = self.progress
        steps = self.steps_at(now_s)
        samples_per_s, peak_bytes = (None, None) if resets_measurements else (old.samples_per_s, old.peak_bytes)
        progress = Progress(
            now_s, steps, old.checkpoint_steps, old.checkpoint_at_s, old.correction, old.loss, old.corrections,
            samples_per_s, peak_bytes, old.measured_gpu, old.other_gpus, old.is_reported,
        )  # fmt: skip
        if now_s - self.state_since_s < SPEED_MEASUREMENT_S_MIN or not self._records_speed:
            return progress
        gpu_s = self.gpu_seconds_per_step()
        return progress.with_measured_gpu_s(self.allocated_gpu, self.allocation.target_gpus, gpu_s)

    @property
    def allocated_gpu(self) -> str:
        """GPU model of the current plan. Empty without a plan, or if the plan mixes models."""
        plan = self.allocation.plan
        return "" if plan is None or plan.is_mixed else plan.stages[0].gpu

    @property
    def _records_speed(self) -> bool:
        """Whether the speed on the current GPUs says something about others: those of a job without a model."""
        return self.state is JobState.RUNNING and not self.spec.has_profile and bool(self.allocated_gpu)

    def gpu_seconds_per_step(self) -> float:
        """Return GPU-seconds per step on the current GPUs, as measured. The job must have a plan."""
        plan = self.allocation.plan
        assert plan is not None, "a running job has a plan"
        return self.progress.correction / (plan.samples_per_s / plan.world_size)

    def _advance_account(
        self, now_s: float, resizes: int = 0, preemptions: int = 0, *, starts: bool = False
    ) -> JobAccount:
        return self.account.advance_to(
            now_s,
            waits=self.state in WAITING_STATES,
            held_gpus=self.allocation.held_gpus,
            resizes=resizes,
            preemptions=preemptions,
            starts=starts,
        )
