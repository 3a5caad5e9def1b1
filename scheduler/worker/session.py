"""Session: what a training script needs of Ebbtide, in any script of the user's own.

    from scheduler.worker.session import Session

    def main():
        with Session.from_environment() as session:
            session.init_process_group()
            model, optimizer, step = build_or_load(session.plan, session.checkpoint_dir)
            session.resumed(step)
            while step < session.steps_total:
                if notice := session.notice():                 # the same answer on all ranks
                    with session.saving(step):
                        save(model, optimizer, step)
                    if notice.leaves:
                        session.leave()
                        return
                loss = train_one_step(model, optimizer)
                step += 1
                session.report(step=step, loss=loss)
            with session.saving(step):
                save(model, optimizer, step)
            session.succeed()

Without any EBBTIDE_* variable the same script runs alone or under torchrun, and no notice ever comes. This module
needs no torch until the process group is made, so a notice is heard from the first moment of a process on.

A script that freezes layers from the front as training goes on (PipeTransformer, ICML'21) says so with
`session.frozen(layers)`, on all ranks, and begins with `session.frozen_layers` frozen: the plan counts on them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scheduler.domain.job_records import LoadTraffic, ReplanPhase
from scheduler.domain.observation import FailureCause, RankPhase, RankStatus
from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json
from scheduler.worker.environment import RankEnvironment, read_rank_environment
from scheduler.worker.notice import (
    CheckpointInterval,
    Notice,
    NoticeAction,
    NoticeFile,
    NoticeMonitor,
    NoticeSource,
    TerminationSignal,
    agree_on_notice,
)
from scheduler.worker.progress import Progress, ProgressReporter
from scheduler.worker.status import PhaseTimer, StatusFile, is_out_of_memory, measure_peak_bytes

logger = logging.getLogger(__name__)

_GROUP_TIMEOUT_S = 300.0


class Session:
    """One rank's side of the contract with the executor; see the module for an example."""

    def __init__(self, environment: RankEnvironment, *, started_at_s: float | None = None) -> None:
        self._environment = environment
        self._phase_timer = PhaseTimer(started_at_s)
        self._status_file = StatusFile(environment.run_dir, rank=environment.rank)
        try:
            self.plan = _read_plan(environment)
        except ValueError as wrong:
            self._status_file.update(phase=RankPhase.FAILED, reason=_describe_error(wrong))
            raise
        self._termination_signal = TerminationSignal() if environment.run_dir is not None else None
        posts = environment.rank == 0 and bool(environment.url)
        self._progress_reporter = ProgressReporter(environment) if posts else None
        self._checkpoint_interval = CheckpointInterval(environment.checkpoint_interval_s)
        self._notice_monitor = NoticeMonitor(self._build_notice_sources())
        self._owns_group = False
        self._frozen_layers = environment.frozen_layers

    @classmethod
    def from_environment(cls, *, started_at_s: float | None = None) -> Self:
        """The session of this process. `began_s`: when it began to be this rank, on `time.monotonic`, where it was
        there before; default: when it was started.

        Raises:
            ValueError: a variable or the plan's file is malformed; the message names it.
        """
        return cls(read_rank_environment(os.environ), started_at_s=started_at_s)

    @property
    def job_id(self) -> str:
        return self._environment.job_id

    @property
    def generation(self) -> int:
        return self._environment.generation

    @property
    def steps_total(self) -> int:
        """Steps of the whole job; 0 where the executor does not say."""
        return self._environment.steps_total

    @property
    def frozen_layers(self) -> int:
        """So many of the first layers are frozen: the plan may count on it from the first step on, whatever an older
        checkpoint says."""
        return self._frozen_layers

    @property
    def checkpoint_step(self) -> int:
        """The step of the newest checkpoint that this job has told of; 0 where it has told of none."""
        return self._environment.checkpoint_step

    @property
    def checkpoint_keep(self) -> int:
        """So many complete checkpoints are to be kept; 0 where the executor does not say."""
        return self._environment.checkpoint_keep

    @property
    def rank(self) -> int:
        return self._environment.rank

    @property
    def world_size(self) -> int:
        return self._environment.world_size

    @property
    def node(self) -> str:
        """On which it runs, by the executor's name for it, else by the host's own."""
        return self._environment.node or os.uname().nodename

    @property
    def checkpoint_dir(self) -> Path | None:
        return self._environment.checkpoint_dir

    @property
    def status(self) -> RankStatus:
        return self._status_file.status

    @property
    def device(self) -> str:
        """`cuda:<local rank>` where there is a GPU, else `cpu`."""
        import torch

        return f"cuda:{self._environment.local_rank}" if torch.cuda.is_available() else "cpu"

    def init_process_group(self, *, timeout_s: float = _GROUP_TIMEOUT_S) -> None:
        """Joins the ranks of this generation: nccl on GPUs, gloo on CPUs; a lone process gets a group of one."""
        import torch
        import torch.distributed as dist

        from scheduler.worker.rendezvous import connect_store

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
        """The state after `step` steps is in place (0: a new start), read from a complete checkpoint if not 0.
        `traffic`: what this rank read of it, where that was counted."""
        self._phase_timer.end_phase(
            ReplanPhase.LOAD if self._phase_timer.has_ended(ReplanPhase.START) else ReplanPhase.START
        )
        self._checkpoint_interval.restart()
        self._update_status(phase=RankPhase.RUNNING, step=step, checkpoint_step=step or None, traffic=traffic)
        self._report_progress()

    def report(self, *, step: int, loss: float | None = None, samples_per_s: float | None = None) -> None:
        """`step` steps are finished; the loss is that of the last one, a mean over the global batch."""
        if loss is not None and not math.isfinite(loss):
            logger.warning("the loss of step %d is %s and is reported as unknown", step, loss)
            loss = None
        if self._phase_timer.has_ended(ReplanPhase.START):
            self._phase_timer.end_phase(ReplanPhase.FIRST_STEP)
        self._update_status(phase=RankPhase.RUNNING, step=step, loss=loss, samples_per_s=samples_per_s)
        self._report_progress()

    def set_frozen_layers(self, layers: int) -> None:
        """From now on the first `layers` layers are not trained; the job may be given another plan for that.

        Raises:
            ValueError: fewer than are frozen already. Layers stay frozen, because the plan may count on it.
        """
        if layers < self._frozen_layers:
            raise ValueError(f"frozen layers: {layers}; it must be at least {self._frozen_layers}, which are frozen")
        self._frozen_layers = layers
        self._status_file.update(frozen_layers=layers)
        if self.status.phase is not RankPhase.STARTING:
            self._report_progress()

    def poll_notice(self) -> Notice | None:
        """What to follow at this step boundary, the same on all ranks. Collective: all call it after each step."""
        step = self.status.step
        own = agreed = self._notice_monitor.next_due(step)
        if self.world_size > 1:
            agreed = agree_on_notice(own, device=self.device)
        if agreed is not None:
            logger.info("notice after step %d: %s", step, agreed.action)
            if agreed.requires_exit:
                self._phase_timer.begin_leaving(
                    0.0 if own is None or own.received_at_s is None else time.monotonic() - own.received_at_s
                )
            if agreed.action is NoticeAction.CHECKPOINT:
                self._notice_monitor.acknowledge(step)
        return agreed

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Around the writing of a checkpoint; at its end the checkpoint of `step` counts as complete."""
        self._update_status(phase=RankPhase.SAVING, step=step)
        yield
        if self._phase_timer.has_ended(ReplanPhase.NOTICE):
            self._phase_timer.end_phase(ReplanPhase.SAVE)
        self._checkpoint_interval.restart()
        self._update_status(phase=RankPhase.RUNNING, checkpoint_step=step)
        self._report_progress()

    def mark_saved(self, step: int) -> None:
        """The checkpoint of `step` is complete, written in the background while the training went on."""
        self._checkpoint_interval.restart()
        self._status_file.update(checkpoint_step=step)
        self._report_progress()

    def leave(self) -> None:
        """The state is saved and this rank exits, because a notice asked for it. Written before any teardown."""
        if self._phase_timer.has_ended(ReplanPhase.NOTICE):
            # A step that is saved already, or was being saved in the background, is not saved once more.
            self._phase_timer.end_phase(ReplanPhase.SAVE)
        self._phase_timer.restart()
        self._update_status(phase=RankPhase.LEFT)

    def succeed(self) -> None:
        """All steps are done and saved. Written before any teardown, for gloo now and then aborts in it."""
        self._update_status(phase=RankPhase.SUCCEEDED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.status.phase.is_terminal:
            reason = "the script ended without leave() or succeed()" if error is None else _describe_error(error)
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
        # One clock for all: what rank 0 hears, all ranks agree on.
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
            peak_bytes=measure_peak_bytes(), phases_s=self._phase_timer.seconds_by_phase, **changes
        )

    def _report_progress(self) -> None:
        if self._progress_reporter is not None:
            now = self.status
            self._progress_reporter.submit(
                Progress(
                    self.generation,
                    now.step,
                    now.loss,
                    now.samples_per_s,
                    now.checkpoint_step,
                    now.peak_bytes,
                    now.frozen_layers,
                ),
            )


def _read_plan(environment: RankEnvironment) -> ParallelPlan | None:
    path = environment.plan_path
    if path is None:
        return None
    try:
        return plan_from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as failure:
        raise ValueError(f"EBBTIDE_PLAN: {path} cannot be read: {failure.strerror}") from None
    except ValueError as wrong:
        raise ValueError(f"EBBTIDE_PLAN: {path}: {wrong}") from None


def _describe_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__
