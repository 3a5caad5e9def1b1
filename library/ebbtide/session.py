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
from ebbtide.rank_status import FailureCause, LoadTraffic, RankPhase, RankStatus, ReplanPhase
from ebbtide.rendezvous import connect_store
from ebbtide.speed_probe import SpeedProbe
from ebbtide.stack_dump import register_stack_dump
from ebbtide.status_file import PhaseTimer, StatusFile, is_out_of_memory, measure_peak_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
        except ValueError as error:
            self._status_file.update(phase=RankPhase.FAILED, reason=_describe_error(error))
            raise
        self._termination_signal = TerminationSignal() if environment.run_dir is not None else None
        if environment.run_dir is not None:
            register_stack_dump()
        self._progress_reporter = _start_reporter(environment)
        self._checkpoint_interval = CheckpointInterval(environment.checkpoint_interval_s)
        self._notice_monitor = NoticeMonitor(self._build_notice_sources())
        self._owns_group = False
        self._notice_group: ProcessGroup | None = None
        self._has_notice_group = False
        self._speed_probe = SpeedProbe()
        self._frozen_layers = environment.frozen_layers

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

    def mark_resumed(self, step: int, traffic: LoadTraffic | None = None) -> None:
        """Report that the state after `step` steps is loaded; 0 is a new start.

        Args:
            step: number of completed steps. If not 0, the state was read from a complete checkpoint.
            traffic: bytes that this rank read from the checkpoint, if they were counted.
        """
        has_started = self._phase_timer.has_ended(ReplanPhase.START)
        self._phase_timer.end_phase(ReplanPhase.LOAD if has_started else ReplanPhase.START)
        self._checkpoint_interval.restart()
        self._update_status(phase=RankPhase.RUNNING, step=step, checkpoint_step=step or None, traffic=traffic)
        self._report_progress()

    def report(self, *, step: int, loss: float | None = None, samples_per_s: float | None = None) -> None:
        """Report `step` completed steps. `loss` is the last step's mean over the global batch."""
        if loss is not None and not math.isfinite(loss):
            logger.warning("The loss of step %d is %s. It is reported as unknown.", step, loss)
            loss = None
        if self._phase_timer.has_ended(ReplanPhase.START):
            self._phase_timer.end_phase(ReplanPhase.FIRST_STEP)
        self._update_status(phase=RankPhase.RUNNING, step=step, loss=loss, samples_per_s=samples_per_s)
        self._report_progress()

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

        Collective: every rank must call it after each step.
        """
        step = self.status.step
        local = agreed = self._notice_monitor.next_due(step)
        if self.world_size > 1:
            is_probe_due = self.rank == 0 and self._speed_probe.is_due
            if not self._has_notice_group:
                # The script may have made the process group itself, so the first poll is the earliest common moment.
                self._notice_group, self._has_notice_group = build_notice_group(), True
            agreed, has_to_probe = agree_on_notice(local, group=self._notice_group, wants_probe=is_probe_due)
            if has_to_probe:
                self._speed_probe.run(self.device)
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

    def succeed(self) -> None:
        """Report that all steps are done and saved. Call it before any teardown, in which Gloo sometimes aborts."""
        self._update_status(phase=RankPhase.SUCCEEDED)

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

    def _update_status(self, **changes: Any) -> None:
        self._status_file.update(
            peak_bytes=measure_peak_bytes(),
            phases_s=self._phase_timer.seconds_by_phase,
            probe_s=self._speed_probe.median_s,
            **changes,
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
