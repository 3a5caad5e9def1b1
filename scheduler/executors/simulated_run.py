"""SimulatedRun: one generation of one simulated job, and the delays of the simulated world."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.domain.gpu_sets import NO_GPUS, Gpus
from scheduler.domain.job import Job
from scheduler.domain.observation import FailureCause, Run, RunPhase

SAVE_SHARE = 1.0 / 3.0
"""Fraction of a reconfiguration, without its bytes, spent saving; the rest starts the new workers. Measured on warm
workers: 0.6 to 1.0 s of 1.6 to 2.9 s.
"""


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays in seconds.

    `start_s` applies to a job's first start. A reconfiguration lasts from the old workers' last step to the new
    workers' first: `reconfiguration_s`, and the time to write and to read the job's checkpoint. `drain_s` is the time
    in which inference leaves a node.

    `checkpoint_bytes` are by job; a job that is absent has none. Each node of a run transfers `storage_bytes_per_s`,
    all of them together one checkpoint. Jobs do not compete for storage.
    """

    start_s: float = 30.0
    reconfiguration_s: float = 30.0
    reconfiguration_s_by_model: Mapping[str, float] = field(default_factory=dict)
    drain_s: float = 60.0
    storage_bytes_per_s: float = math.inf
    checkpoint_bytes: Mapping[str, float] = field(default_factory=dict)

    def compute_save_s(self, job: Job, *, nodes: int) -> float:
        """Return the time from the last step on so many nodes until the checkpoint is complete."""
        return SAVE_SHARE * self._get_reconfiguration_s(job) + self.compute_transfer_s(job.id, nodes=nodes)

    def compute_restart_s(self, job: Job, *, nodes: int) -> float:
        """Return the time from the start of workers on so many nodes, which load a checkpoint, to their first step."""
        return (1.0 - SAVE_SHARE) * self._get_reconfiguration_s(job) + self.compute_transfer_s(job.id, nodes=nodes)

    def compute_transfer_s(self, job_id: str, *, nodes: int) -> float:
        """Return the time in which so many nodes write or read the job's checkpoint."""
        return self.checkpoint_bytes.get(job_id, 0.0) / (nodes * self.storage_bytes_per_s)

    def _get_reconfiguration_s(self, job: Job) -> float:
        return self.reconfiguration_s_by_model.get(job.spec.model, self.reconfiguration_s)


_NEVER_S = math.inf
_STEP_TOLERANCE = 1e-9
"""Relative tolerance of step counts, so that a step that ends now counts as completed."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """True parameters of a run. `step_time_s` and `steps_max` can be infinite.

    A periodic checkpoint is complete `transfer_s` after its last step, while the run goes on; until then, no other
    begins.
    """

    job_id: str
    generation: int
    gpus: Gpus
    step_time_s: float
    steps_start: float
    steps_max: float
    checkpoint_interval_s: float
    transfer_s: float = 0.0

    @property
    def checkpoint_period_s(self) -> float:
        """Time between the beginnings of two periodic checkpoints."""
        return max(self.checkpoint_interval_s, self.transfer_s)


@dataclass(frozen=True, slots=True)
class RunWork:
    """Compute time of an ended run. Work after `kept_until_s` was lost.

    `is_save_incomplete` tells that the run was killed at its deadline while it saved.
    """

    job_id: str
    gpus: Gpus
    since_s: float
    until_s: float
    kept_until_s: float
    is_save_incomplete: bool = False


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """A simulated run. `due_s` is the time of its next phase change.

    It computes from `computing_since_s` until it finishes, dies, or leaves at a step boundary. Work after the last
    checkpoint is lost unless it saves first.
    """

    spec: RunSpec
    phase: RunPhase = RunPhase.STARTING
    due_s: float = _NEVER_S
    computing_since_s: float = _NEVER_S
    ended_at_s: float = _NEVER_S
    steps_kept: float = 0.0
    reason: str = ""
    cause: FailureCause | None = None
    peak_bytes: int | None = None
    fresh: bool = True
    is_save_incomplete: bool = False
    _requested_steps: float = -_NEVER_S
    _previous_checkpoint_steps: float = -_NEVER_S
    _stop_s: float = _NEVER_S
    _saved_s: float = _NEVER_S
    _last_report: Run | None = field(default=None, repr=False)
    report_until_s: float = -_NEVER_S

    @classmethod
    def start(cls, spec: RunSpec, *, now_s: float, delay_s: float) -> SimulatedRun:
        run = cls(spec, due_s=now_s + delay_s, steps_kept=spec.steps_start)
        if delay_s <= 0:
            run.begin_computing(now_s)
        return run

    @property
    def is_live(self) -> bool:
        return self.phase in (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.LEAVING)

    def begin_computing(self, now_s: float) -> None:
        self.phase, self.fresh, self.computing_since_s = RunPhase.RUNNING, True, now_s
        self.due_s = self._time_of(self.spec.steps_max)

    def save(self, now_s: float) -> None:
        """Save at the next step boundary and continue."""
        self._previous_checkpoint_steps = self._checkpoint_at(now_s)
        self._requested_steps, self.fresh = self._next_boundary(now_s), True

    def leave(self, now_s: float, *, by_s: float, save_s: float) -> None:
        """Stop at the next step boundary, save and exit, by `by_s` at the latest. Later calls only change `by_s`."""
        if self.phase is RunPhase.STARTING:
            self._end(RunPhase.LEFT, now_s, kept=self.spec.steps_start, reason="it had not started")
            return
        if self.phase is RunPhase.RUNNING:
            boundary = self._next_boundary(now_s)
            finishes = boundary >= self.spec.steps_max
            self._stop_s = max(now_s, self._time_of(boundary))
            self._saved_s = self._stop_s + (0.0 if finishes else save_s)
            self.phase, self.fresh = RunPhase.LEAVING, True
        self.due_s = max(now_s, min(self._saved_s, by_s))

    def advance(self) -> None:
        """Perform the phase change that is due at `due_s`."""
        now_s = self.due_s
        if self.phase is RunPhase.STARTING:
            self.begin_computing(now_s)
        elif self.phase is RunPhase.RUNNING or (now_s >= self._saved_s and self._all_done_at(now_s)):
            self._end(RunPhase.SUCCEEDED, now_s, kept=self.spec.steps_max)
        elif now_s >= self._saved_s:
            self._end(RunPhase.LEFT, now_s, kept=float(round(self._steps_at(now_s))))
        else:
            self.is_save_incomplete = True
            self.kill(RunPhase.LOST, now_s, reason="killed at its deadline")

    def kill(self, phase: RunPhase, now_s: float, *, reason: str) -> None:
        """End at once. Unsaved work is lost."""
        self._end(phase, now_s, kept=self._checkpoint_at(now_s), reason=reason)

    def has_unreported_change(self, now_s: float) -> bool:
        """Return whether a phase change or checkpoint has not been reported yet."""
        return self.fresh or now_s >= self.report_until_s

    def to_run(self, now_s: float) -> Run:
        """Return the run as observed. Steps are included only with other changes."""
        if self._last_report is None or self.has_unreported_change(now_s):
            return self._build_run(now_s, steps=self._steps_at(now_s))
        return self._last_report

    def mark_reported(self, now_s: float) -> None:
        """Mark the state at `now_s` as reported."""
        self.fresh = False
        self.report_until_s = self._next_checkpoint_s(now_s)
        self._last_report = self._build_run(now_s, steps=None if self.is_live else self._steps_at(now_s))

    @property
    def stopped_at_s(self) -> float:
        """When it stopped computing, before its final save."""
        return min(self._stop_s, self.ended_at_s)

    def get_work(self) -> RunWork | None:
        """Return the compute time of an ended run, None if it never computed."""
        if self.computing_since_s == _NEVER_S:
            return None
        spec, since_s, until_s = self.spec, self.computing_since_s, self.stopped_at_s
        return RunWork(spec.job_id, spec.gpus, since_s, until_s, self.kept_until_s, self.is_save_incomplete)

    @property
    def kept_until_s(self) -> float:
        """When it completed the steps that were not lost."""
        return min(self.stopped_at_s, self._time_of(max(self.steps_kept, self.spec.steps_start)))

    def _build_run(self, now_s: float, *, steps: float | None) -> Run:
        spec = self.spec
        live = self.is_live
        kept = self._checkpoint_at(now_s) if live else self.steps_kept
        return Run(
            job_id=spec.job_id,
            generation=spec.generation,
            phase=self.phase,
            gpus=spec.gpus if live else NO_GPUS,
            steps=steps,
            checkpoint_steps=kept,
            reason=self.reason,
            cause=self.cause,
            peak_bytes=self.peak_bytes,
        )

    def _end(self, phase: RunPhase, now_s: float, *, kept: float, reason: str = "") -> None:
        self.phase, self.ended_at_s, self.due_s, self.fresh = phase, now_s, _NEVER_S, True
        self.steps_kept, self.reason = kept, reason

    def _all_done_at(self, now_s: float) -> bool:
        return self._steps_at(now_s) >= self.spec.steps_max * (1 - _STEP_TOLERANCE)

    def _steps_at(self, now_s: float) -> float:
        computing_s = min(now_s, self.stopped_at_s) - self.computing_since_s
        if computing_s <= 0:
            return self.spec.steps_start
        return min(self.spec.steps_max, self.spec.steps_start + computing_s / self.spec.step_time_s)

    def _next_boundary(self, now_s: float) -> float:
        return min(float(math.ceil(self._steps_at(now_s) * (1 - _STEP_TOLERANCE))), self.spec.steps_max)

    def _time_of(self, steps: float) -> float:
        return self.computing_since_s + (steps - self.spec.steps_start) * self.spec.step_time_s

    def _checkpoints_by(self, now_s: float) -> int:
        """Return the number of periodic checkpoints that are complete."""
        saving_s = min(now_s, self.stopped_at_s) - self.computing_since_s - self.spec.transfer_s
        return int(saving_s / self.spec.checkpoint_period_s * (1 + _STEP_TOLERANCE)) if saving_s > 0 else 0

    def _checkpoint_at(self, now_s: float) -> float:
        """Return the steps in the last checkpoint, including ones saved while computing, else the initial steps."""
        number = self._checkpoints_by(now_s)
        is_complete = self._time_of(self._requested_steps) + self.spec.transfer_s <= now_s
        requested = self._requested_steps if is_complete else self._previous_checkpoint_steps
        if number == 0:
            return max(self.spec.steps_start, requested)
        at_s = self.computing_since_s + number * self.spec.checkpoint_period_s
        return max(requested, self.spec.steps_start, float(math.floor(self._steps_at(at_s) * (1 + _STEP_TOLERANCE))))

    def _next_checkpoint_s(self, now_s: float) -> float:
        if self.phase is not RunPhase.RUNNING:
            return _NEVER_S
        transfer_s = self.spec.transfer_s
        requested_s = self._time_of(self._requested_steps) + transfer_s
        number = self._checkpoints_by(now_s) + 1
        periodic_s = self.computing_since_s + number * self.spec.checkpoint_period_s + transfer_s
        return min(periodic_s, requested_s) if requested_s > now_s else periodic_s


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A simulated job: last desired state, live run, and results of ended runs."""

    job: Job
    live: SimulatedRun | None = None
    steps_saved: float = 0.0
    started: bool = False
    succeeded: bool = False
    generation_ended: int = 0
    extra_save_s: float = 0.0
    asked_at_s: float | None = None
