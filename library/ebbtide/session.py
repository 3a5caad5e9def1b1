"""The training session: one rank's side of the contract with the executor."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ebbtide.environment import RankEnvironment, read_rank_environment
from ebbtide.notice import (
    AgreementPace,
    CheckpointInterval,
    Notice,
    NoticeAction,
    NoticeFile,
    NoticeMonitor,
    NoticeSource,
    TerminationSignal,
    agree_on_notice,
    build_notice_group,
)
from ebbtide.plan_check import count_plan_ranks, find_degree_mismatch, find_degrees
from ebbtide.rank_status import FailureCause, LoadTraffic, RankPhase, RankStatus, ReplanPhase
from ebbtide.rendezvous import connect_store
from ebbtide.speed_probe import SpeedProbe
from ebbtide.stack_dump import register_stack_dump
from ebbtide.status_file import PhaseTimer, StatusFile, is_out_of_memory, measure_peak_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ebbtide.checkpoints.nonfinite_losses import NonfiniteLossRecord
    from ebbtide.progress import ProgressReporter

logger = logging.getLogger(__name__)

_GROUP_TIMEOUT_S = 300.0


class Session:
    """One rank's side of the contract with the executor. The docstring of `ebbtide` has an example."""

    def __init__(self, environment: RankEnvironment, *, started_at_s: float | None = None) -> None:
        self._environment = environment
        self._phase_timer = PhaseTimer(started_at_s)
        self._status_file = StatusFile(environment.run_dir, rank=environment.rank)
        try:
            self._plan = _read_plan(environment)
            self._check_world_size()
        except ValueError as error:
            self._status_file.update(phase=RankPhase.FAILED, reason=_describe_error(error))
            raise
        self._termination_signal = TerminationSignal() if environment.run_dir is not None else None
        if environment.run_dir is not None:
            register_stack_dump()
        self._progress_reporter = _start_reporter(environment)
        self._checkpoint_interval = CheckpointInterval(environment.checkpoint_interval_s)
        self._notice_monitor = NoticeMonitor(self._build_notice_sources())
        self._nonfinite_losses: NonfiniteLossRecord | None = None
        self._nonfinite_folder = environment.checkpoint_dir
        self._deferred: dict[str, Any] = {}
        self._owns_group = False
        self._agreement_pace = AgreementPace()
        self._notice_group: ProcessGroup | None = None
        self._has_notice_group = False
        self._speed_probe = SpeedProbe()
        self._frozen_layers = environment.frozen_layers
        self._has_checked_degrees = False

    @classmethod
    def from_environment(cls, *, started_at_s: float | None = None) -> Session:
        """Return the session of this process.

        Args:
            started_at_s: when the process became this rank, on `time.monotonic`. Default: when the process started.

        Raises:
            ValueError: a variable or the plan file is malformed; the message names it.
        """
        return cls(read_rank_environment(os.environ), started_at_s=started_at_s)

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """The parallel plan of this generation as the JSON document of `EBBTIDE_PLAN`; None without one."""
        return self._plan

    @property
    def job_id(self) -> str:
        """ID of the job; `local` without an executor."""
        return self._environment.job_id

    @property
    def generation(self) -> int:
        """Number of the allocation of GPUs that this rank belongs to. Each resize starts the next generation."""
        return self._environment.generation

    @property
    def steps_total(self) -> int:
        """Steps of the whole job; 0 if the executor does not set it."""
        return self._environment.steps_total

    @property
    def frozen_layers(self) -> int:
        """Number of layers frozen from the front.

        The plan may rely on it from the first step, even if the checkpoint is older.
        """
        return self._frozen_layers

    @property
    def checkpoint_step(self) -> int:
        """Step of the newest checkpoint that the job has reported; 0 if it has reported none."""
        return self._environment.checkpoint_step

    @property
    def checkpoint_keep(self) -> int:
        """Number of complete checkpoints to keep; 0 if the executor does not set it."""
        return self._environment.checkpoint_keep

    @property
    def rank(self) -> int:
        """Number of this process among the processes of the generation."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """Number of processes of the generation."""
        return self._environment.world_size

    @property
    def node(self) -> str:
        """The executor's name for this node, or the host name without an executor."""
        return self._environment.node or os.uname().nodename

    @property
    def checkpoint_dir(self) -> Path | None:
        """Directory for the job's checkpoints, shared by its ranks; None if the executor does not set it.

        Raises:
            ValueError: checkpoints are in an object store.
        """
        if self._environment.checkpoint_url:
            raise ValueError(
                f"`EBBTIDE_CHECKPOINT_DIR` is {self._environment.checkpoint_url}, an object store and no directory. "
                "Save to `session.checkpoint_url`, or set `checkpoint.dir` of the job to a directory."
            )
        return self._environment.checkpoint_dir

    @property
    def checkpoint_url(self) -> str:
        """URL of the object store for the job's checkpoints, such as s3://bucket/run; empty for a directory."""
        return self._environment.checkpoint_url

    @property
    def status(self) -> RankStatus:
        """Status that this rank has reported so far."""
        self._status_file.merge(self._deferred)
        self._deferred = {}
        return self._status_file.status

    @property
    def device(self) -> str:
        """`cuda:<local rank>` on a node with a GPU, otherwise `cpu`."""
        import torch

        return f"cuda:{self._environment.local_rank}" if torch.cuda.is_available() else "cpu"

    def init_process_group(self, *, timeout_s: float = _GROUP_TIMEOUT_S) -> None:
        """Join the ranks of this generation: NCCL on GPUs, Gloo on CPUs, a group of one for a lone process."""
        import torch
        import torch.distributed as dist

        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(self._environment.local_rank)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=connect_store(self._environment, timeout_s=timeout_s),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=torch.device(self.device) if on_gpu else None,
        )
        self._owns_group = True
        self._phase_timer.end_phase(ReplanPhase.START)

    def mark_started(self) -> None:
        """Report that this rank is ready to load its state. `init_process_group` implies it."""
        self._phase_timer.end_phase(ReplanPhase.START)

    def check_degrees(self, **found: int) -> None:
        """Check that training runs with the degrees of the plan. Without a plan, do nothing.

        Megatron-LM and Accelerate are checked without this call when the job names a `framework`.

        Args:
            found: degrees of the running script: any of `tp`, `pp`, `dp`, `cp` (Ulysses times ring) and `ep`.

        Raises:
            ValueError: a degree differs from the plan's; the message names it.
        """
        problem = "" if self._plan is None else find_degree_mismatch(self._plan, found)
        self._has_checked_degrees = True
        if problem:
            raise ValueError(problem)

    def mark_resumed(self, step: int, traffic: LoadTraffic | None = None) -> None:
        """Report that the state after `step` steps is loaded; 0 is a new start.

        Args:
            step: number of completed steps. If not 0, the state was read from a complete checkpoint.
            traffic: bytes that this rank read from the checkpoint, if they were counted.
        """
        self._check_framework()
        has_started = self._phase_timer.has_ended(ReplanPhase.START)
        self._phase_timer.end_phase(ReplanPhase.LOAD if has_started else ReplanPhase.START)
        self._checkpoint_interval.restart()
        self._update_status(phase=RankPhase.RUNNING, step=step, checkpoint_step=step or None, traffic=traffic)
        self._report_progress()

    def report(self, *, step: int, loss: float | None = None, samples_per_s: float | None = None) -> None:
        """Report `step` completed steps. `loss` is the last step's mean over the global batch."""
        if not self._has_checked_degrees:
            self._check_framework()
        if loss is not None and not math.isfinite(loss):
            logger.warning("The loss of step %d is %s. It is reported as unknown.", step, loss)
            self._record_nonfinite_loss()
            loss = None
        elif loss is not None and self._nonfinite_losses is not None:
            self._nonfinite_losses.withdraw()
            self._nonfinite_losses = None
        progress = {"phase": RankPhase.RUNNING, "step": step, "loss": loss, "samples_per_s": samples_per_s}
        if self._status_file.defers(RankPhase.RUNNING) and self._phase_timer.has_made_first_step:
            # Most steps are short, and nobody reads this file more often than it is written.
            self._deferred = progress
            return
        if self._phase_timer.has_ended(ReplanPhase.START):
            self._phase_timer.end_phase(ReplanPhase.FIRST_STEP)
        self._update_status(**progress)
        self._report_progress()

    def record_nonfinite_losses_in(self, folder: Path) -> None:
        """Name the directory of the checkpoints, if it is not the job's. Non-finite losses are recorded beside them."""
        self._nonfinite_folder = folder

    def heartbeat(self) -> None:
        """Report that this rank makes progress. Call it during work that takes longer than the job's `hangTimeout`.

        `report` and `saving` imply it. An evaluation of some minutes needs it in its loop.
        """
        self._update_status()

    def set_frozen_layers(self, layers: int) -> None:
        """Report that the first `layers` layers are no longer trained. The job may be replanned for it.

        Raises:
            ValueError: `layers` is smaller than before. Layers stay frozen because the plan relies on it.
        """
        if layers < self._frozen_layers:
            raise ValueError(
                f"`layers` is {layers}, but {self._frozen_layers} layers are already frozen. "
                f"Layers cannot be unfrozen: pass {self._frozen_layers} or more."
            )
        self._frozen_layers = layers
        self._status_file.update(frozen_layers=layers)
        if self.status.phase is not RankPhase.STARTING:
            self._report_progress()

    def poll_notice(self) -> Notice | None:
        """Return the notice to act on at this step boundary, or None.

        Collective: every rank must call it after each step. Several ranks agree about every 0.5 s, and at every 25th
        call at the latest. One rank looks for a notice every 0.05 s at most.
        """
        if self.world_size > 1 and not self._agreement_pace.is_due():
            return None
        step = self._deferred["step"] if self._deferred else self._status_file.status.step
        local = self._notice_monitor.next_due(step)
        agreed = local if self.world_size == 1 else self._agree(local)
        if agreed is None:
            return None
        logger.info("Notice after step %d: %s", step, agreed.action)
        if agreed.requires_exit:
            received_at_s = None if local is None else local.received_at_s
            self._phase_timer.begin_leaving(0.0 if received_at_s is None else time.monotonic() - received_at_s)
        if agreed.action is NoticeAction.CHECKPOINT:
            self._notice_monitor.acknowledge(step)
        return agreed

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Surround the writing of a checkpoint. On exit the checkpoint of `step` counts as complete."""
        self._update_status(phase=RankPhase.SAVING, step=step)
        yield
        if self._phase_timer.has_ended(ReplanPhase.NOTICE):
            self._phase_timer.end_phase(ReplanPhase.SAVE)
        self._checkpoint_interval.restart()
        self._update_status(phase=RankPhase.RUNNING, checkpoint_step=step)
        self._report_progress()

    def mark_saved(self, step: int) -> None:
        """Report that a background save of `step` is complete."""
        self._checkpoint_interval.restart()
        self._status_file.update(checkpoint_step=step)
        self._report_progress()

    def leave(self) -> None:
        """Report that the state is saved and this rank exits as requested. Call it before any teardown."""
        if self._phase_timer.has_ended(ReplanPhase.NOTICE):
            # A step that was saved in the background has no `saving` block that ends this phase.
            self._phase_timer.end_phase(ReplanPhase.SAVE)
        self._phase_timer.restart()
        self._update_status(phase=RankPhase.LEFT)

    def succeed(self, *, awaits_exit_code: bool = False) -> None:
        """Report that all steps are done and saved. Call it before any teardown, in which Gloo sometimes aborts.

        Args:
            awaits_exit_code: the script can still fail, by ending with a non-zero exit code.
        """
        self._update_status(phase=RankPhase.SUCCEEDED, awaits_exit_code=awaits_exit_code)

    def __enter__(self) -> Session:
        """Return the session. When the block ends without `leave` or `succeed`, the rank is reported as failed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.status.phase.is_terminal:
            reason = (
                "The script ended without calling leave() or succeed()." if error is None else _describe_error(error)
            )
            cause = FailureCause.OUT_OF_MEMORY if is_out_of_memory(error) else None
            self._update_status(phase=RankPhase.FAILED, reason=reason, cause=cause)
        self._close()
        if self._phase_timer.has_ended(ReplanPhase.NOTICE) and self.status.phase is RankPhase.LEFT:
            self._phase_timer.end_phase(ReplanPhase.TEARDOWN)
            self._update_status()

    def _check_world_size(self) -> None:
        """Raise ValueError if a job of a framework has another number of ranks than its plan."""
        planned = None if self._plan is None or not self._environment.framework else count_plan_ranks(self._plan)
        if planned is not None and planned != self.world_size:
            raise ValueError(
                f"`WORLD_SIZE` is {self.world_size}, but the plan of this generation has {planned} ranks. "
                "Start one process per GPU, for example with --nproc_per_node={nproc_per_node} in `command`."
            )

    def _check_framework(self) -> None:
        """Check the degrees of the framework that the job names, if it has set them up."""
        if self._environment.framework and (found := find_degrees()):
            self.check_degrees(**found)

    def _close(self) -> None:
        if self._progress_reporter is not None:
            self._progress_reporter.close()
        if self._owns_group:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._owns_group = False
        if self._termination_signal is not None:
            self._termination_signal.close()

    def _build_notice_sources(self) -> list[NoticeSource]:
        # Rank 0 alone watches the interval: the ranks agree on notices, and their clocks differ.
        sources: list[NoticeSource] = [self._checkpoint_interval] if self.rank == 0 else []
        if self._environment.run_dir is not None:
            sources.append(NoticeFile(self._environment.run_dir / "notice.json"))
        if self._termination_signal is not None:
            sources.append(self._termination_signal)
        if self._progress_reporter is not None:
            sources.append(self._progress_reporter)
        return sources

    def _agree(self, local: Notice | None) -> Notice | None:
        """Return the notice that the ranks agree on. Probe the device if rank 0 wants it."""
        is_probe_due = self.rank == 0 and self._speed_probe.is_due
        if not self._has_notice_group:
            # The script may have made the process group itself, so the first poll is the earliest common moment.
            self._notice_group, self._has_notice_group = build_notice_group(), True
        pace, group = self._agreement_pace, self._notice_group
        boundaries = pace.propose() if self.rank == 0 else 1
        agreement = agree_on_notice(local, group=group, wants_probe=is_probe_due, boundaries=boundaries)
        pace.restart(agreement.boundaries)
        if agreement.wants_probe:
            self._speed_probe.run(self.device)
        return agreement.notice

    def _record_nonfinite_loss(self) -> None:
        """Record beside the checkpoints that the loss is not finite, so that a second time leads to an earlier one."""
        folder, step = self._nonfinite_folder, self.status.checkpoint_step
        if self.rank != 0 or folder is None or step is None or self._nonfinite_losses is not None:
            return
        from ebbtide.checkpoints.nonfinite_losses import NonfiniteLossRecord

        self._nonfinite_losses = NonfiniteLossRecord(folder, generation=self.generation)
        self._nonfinite_losses.record(step)

    def _update_status(self, **changes: Any) -> None:
        deferred, self._deferred = self._deferred, {}
        self._status_file.update(
            peak_bytes=measure_peak_bytes(),
            phases_s=self._phase_timer.seconds_by_phase,
            probe_s=self._speed_probe.median_s,
            **{**deferred, **changes},
        )

    def _report_progress(self) -> None:
        if self._progress_reporter is not None:
            self._progress_reporter.submit(self.status)


def _start_reporter(environment: RankEnvironment) -> ProgressReporter | None:
    """Return the reporter of rank 0, None for other ranks and without a control plane."""
    if environment.rank != 0 or not environment.url:
        return None
    # Importing http.client takes 20 ms, which only this rank has to spend.
    from ebbtide.progress import ProgressReporter

    return ProgressReporter(environment)


def _read_plan(environment: RankEnvironment) -> Mapping[str, Any] | None:
    path = environment.plan_path
    if path is None:
        return None
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"Cannot read the plan {path} named by `EBBTIDE_PLAN`: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"The plan {path} named by `EBBTIDE_PLAN` is malformed: {error}") from None
    if not isinstance(plan, dict):
        raise ValueError(
            f"The plan {path} named by `EBBTIDE_PLAN` is malformed: expected a JSON object, got {type(plan).__name__}."
        )
    return plan


def _describe_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__
