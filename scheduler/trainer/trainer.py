"""Trainer: the reference training loop of a GPT on the shipped text, under whatever plan the session has."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from scheduler.domain.job_records import LoadTraffic
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import BatchChange, CheckpointError, Manifest, TrainingPosition
from scheduler.trainer.dataset import BatchLoader
from scheduler.trainer.layout import Layout, build_layout, make_data_parallel_plan
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import get_model_size
from scheduler.trainer.model_parts import BuildOptions, build_model_parts
from scheduler.trainer.optimizer import BatchScalingRule, LearningRateDecay, LearningRateSchedule, build_optimizers
from scheduler.trainer.pipeline import build_forward_backward
from scheduler.trainer.training_state import Ledger, TrainablePart, collect_state, compute_global_digest, restore_state
from scheduler.worker.session import Session

logger = logging.getLogger(__name__)
_LOG_PERIOD_S = 5.0

_DEFAULT_GLOBAL_BATCH = 12
_DEFAULT_KEEP = 2


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Zeros mean: `steps` and `keep` the job's, `global_batch` the plan's, `checkpoint_every` as often as the job's
    interval says. `freeze` holds pairs (step, blocks): from that step on so many blocks at the front no longer learn.
    With `ledger_digests` the ledger holds a digest of the whole state at each save and load too, for which each rank
    needs room for it."""

    model: str = "tiny-gpt"
    steps: int = 0
    global_batch: int = 0
    batch_rule: BatchScalingRule = BatchScalingRule.KEEP
    checkpoint_every: int = 0
    keep: int = 0
    seed: int = 0
    dtype: str = "float32"
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay: LearningRateDecay = LearningRateDecay.CONSTANT
    freeze: tuple[tuple[int, int], ...] = ()
    step_delay_s: float = 0.0
    ledger_dir: Path | None = None
    ledger_digests: bool = False

    def frozen_blocks_at(self, step: int) -> int:
        return max((blocks for begin, blocks in self.freeze if begin <= step), default=0)


def build_settings(options: Mapping[str, Any]) -> TrainerSettings:
    """From the options of the command line, by their names."""
    named = {"batch_rule": BatchScalingRule(options["batch_rule"]), "decay": LearningRateDecay(options["decay"])}
    return TrainerSettings(**{**options, **named})


def train(session: Session, settings: TrainerSettings) -> None:
    """Trains to the last step, or to the step at which a notice says leave.

    Raises:
        ValueError: settings, plan or checkpoint do not fit each other; the message names what.
    """
    steps = settings.steps or session.steps_total
    if steps < 1:
        raise ValueError("steps is 0: give --steps or EBBTIDE_STEPS, at least 1")
    # What cannot be run is refused before the ranks wait for each other.
    blocks = get_model_size(settings.model).layers
    _validate_frozen_blocks(session, settings, blocks)
    planned = build_layout(_select_plan(session, settings), world_size=session.world_size, block_count=blocks)
    torch.set_num_threads(1)
    session.init_process_group()
    keep = settings.keep or session.checkpoint_keep or _DEFAULT_KEEP
    trainer = Trainer(session, replace(settings, steps=steps, keep=keep), planned)
    trainer.resume()
    while trainer.position.step < steps:
        notice = session.poll_notice()
        if notice is not None and notice.requires_exit:
            trainer.save()
            session.leave()
            return
        if notice is not None:
            trainer.save_in_background()
        trainer.train_step()
        if settings.checkpoint_every and trainer.position.step % settings.checkpoint_every == 0:
            trainer.save_in_background()
    trainer.save()
    session.succeed()


class Trainer:
    """Model, optimizer, data and position of one rank."""

    def __init__(self, session: Session, settings: TrainerSettings, layout: Layout) -> None:
        # Frozen from the start is built so: to build anew before the first step would count as a step of Adam's.
        self.position = TrainingPosition(
            step=0, samples=0, frozen=max(session.frozen_layers, settings.frozen_blocks_at(0))
        )
        self._session = session
        self._settings = settings
        self._layout = layout
        self._checkpoint_root = session.checkpoint_dir
        self._learning_rate = LearningRateSchedule(
            settings.learning_rate, settings.steps, settings.warmup_steps, settings.decay
        )
        self._batch_changes: tuple[BatchChange, ...] = ()
        self._meshes = build_meshes(layout, device=session.device)
        self._save_resources = checkpoint.BackgroundSaveResources()
        self._background_save: checkpoint.BackgroundSave | None = None
        self._logged_at_s = float("-inf")
        size = get_model_size(settings.model)
        self._batches = BatchLoader(layout, size=size, rank=session.rank, seed=settings.seed, device=session.device)
        torch.manual_seed(settings.seed)
        self._ledger = Ledger(settings.ledger_dir, generation=session.generation, rank=session.rank)

    def resume(self) -> None:
        """Builds the model, and takes up the last complete checkpoint where there is one. At least as many blocks are
        frozen as the control plane knows of, for the plan counts on them, and as the checkpoint says, which it is told
        where that is more."""
        found = None
        if self._checkpoint_root is not None:
            # Looked at before anything is made there: a folder that has vanished must not come back empty.
            found = checkpoint.find_latest(self._checkpoint_root)
            if found is None:
                checkpoint.reject_lost_checkpoint(self._checkpoint_root, step=self._session.checkpoint_step)
            checkpoint.require_writable(self._checkpoint_root)
        if self._checkpoint_root is not None and found is not None:
            self._warn_if_older(found.position.step)
            traffic = self._load_checkpoint(self._checkpoint_root, found)
            self._record_digest("loaded")
        else:
            traffic = None
            self._build_model(frozen_blocks=self.position.frozen)
        if self._checkpoint_root is not None:
            checkpoint.remove_unfinished(self._checkpoint_root)
        self._report_frozen_layers()
        self._session.mark_resumed(self.position.step, traffic)

    def _warn_if_older(self, found: int) -> None:
        saved = self._session.checkpoint_step
        if found < saved:
            told = "this job has saved step %d, but the newest whole checkpoint is of step %d: %d steps are done again"
            logger.warning(told, saved, found, saved - found)

    def train_step(self) -> None:
        """Forward and backward over this rank's share, one update, and a report of the global batch's mean loss."""
        began_s = time.perf_counter()
        self._freeze_if_due()
        share = self._forward_backward(*self._batches.load_batch(self.position.samples))
        self._step_optimizers()
        loss = self._reduce_loss(share)
        time.sleep(self._settings.step_delay_s)
        batch = self._layout.global_batch
        self._ledger.record_step(
            self.position.step + 1, samples=self._batches.owned_samples(self.position.samples), loss=loss
        )
        self.position = replace(self.position, step=self.position.step + 1, samples=self.position.samples + batch)
        ended_s = time.perf_counter()
        self._session.report(step=self.position.step, loss=loss, samples_per_s=batch / (ended_s - began_s))
        if ended_s - self._logged_at_s >= _LOG_PERIOD_S:
            self._logged_at_s = ended_s
            logger.info("step %d: loss %.4f, %.1f samples/s", self.position.step, loss, batch / (ended_s - began_s))
        if self._background_save is not None and self._background_save.is_done:
            self._finish_background_save()

    def save_in_background(self) -> None:
        """Saves the present step in the background. One that is still under way is waited for first."""
        if self._checkpoint_root is None or not self._is_unsaved():
            return
        began_s = time.perf_counter()
        self._finish_background_save()
        try:
            self._background_save = checkpoint.BackgroundSave(
                self._checkpoint_root,
                self._parts,
                self._build_manifest(),
                node=self._session.node,
                keep=self._settings.keep,
                resources=self._save_resources,
            )
        except CheckpointError as failure:
            _log_failed_save(failure)
            return
        held_up_s = time.perf_counter() - began_s
        logger.info("the save after step %d held the training up for %.3f s", self.position.step, held_up_s)
        self._record_digest("saved")

    def save(self) -> None:
        """Saves the present step, once. The start is not saved, and without a checkpoint directory nothing is."""
        self._finish_background_save()
        if self._checkpoint_root is None or not self._is_unsaved():
            return
        with self._session.saving(self.position.step):
            checkpoint.save(
                self._checkpoint_root,
                self._parts,
                self._build_manifest(),
                node=self._session.node,
                keep=self._settings.keep,
            )
        self._record_digest("saved")

    def _finish_background_save(self) -> None:
        """A save in the background that failed costs safety and no work: the training goes on, and tries again at the
        next one. What was complete before stays so."""
        if self._background_save is not None:
            saving, self._background_save = self._background_save, None
            try:
                saving.wait()
            except CheckpointError as failure:
                _log_failed_save(failure)
            else:
                self._session.mark_saved(saving.step)

    def _is_unsaved(self) -> bool:
        return self.position.step > 0 and self._session.status.checkpoint_step != self.position.step

    def _build_model(self, *, frozen_blocks: int = 0, for_loading: bool = False) -> None:
        """The model with its first weights, or blank, and its optimizers. Collective."""
        settings, session = self._settings, self._session
        build = BuildOptions(
            get_model_size(settings.model),
            session.rank,
            session.device,
            settings.seed,
            _parse_dtype(settings.dtype),
            frozen_blocks,
            for_loading,
        )
        parts = build_model_parts(self._layout, self._meshes, build)
        self._parts = tuple(
            TrainablePart(
                part.module,
                build_optimizers(part, self._layout, learning_rate=settings.learning_rate, for_loading=for_loading),
            )
            for part in parts
        )
        self._forward_backward = build_forward_backward(self._layout, self._meshes, parts, build)

    def _load_checkpoint(self, root: Path, found: Manifest) -> LoadTraffic:
        frozen = max(found.position.frozen, self.position.frozen)
        self._build_model(frozen_blocks=frozen, for_loading=True)
        batch = int(found.settings["global_batch"])
        changes = found.batch_changes + self._check_batch_change(found.position.step, batch)
        identity = {**self._training_identity(), "global_batch": batch}
        traffic = checkpoint.load(root, found, self._parts, settings=identity, node=self._session.node)
        self.position, self._batch_changes = replace(found.position, frozen=frozen), changes
        # A load fills tensors; this number of the optimizers follows from the position, as it did before the save.
        self._set_learning_rate(found.position.step - 1)
        return traffic

    def _check_batch_change(self, step: int, before: int) -> tuple[BatchChange, ...]:
        """
        Raises:
            CheckpointError: the batch has changed, and no rule says how the learning rate follows.
        """
        after, rule = self._layout.global_batch, self._settings.batch_rule
        if before == after:
            return ()
        try:
            factor = rule.compute_factor(before, after)
        except ValueError as refused:
            raise CheckpointError(str(refused)) from None
        logger.warning(
            "global batch %d -> %d after step %d: learning rate times %.4g (%s)", before, after, step, factor, rule
        )
        return (BatchChange(step, before, after, rule, factor),)

    def _freeze_if_due(self) -> None:
        """Blocks that no longer learn leave the optimizer: the model is built anew around the state as it is."""
        frozen = self._settings.frozen_blocks_at(self.position.step)
        if frozen <= self.position.frozen:
            return
        kept = collect_state(self._parts)
        self._build_model(frozen_blocks=frozen, for_loading=True)
        restore_state(self._parts, kept)
        self.position = replace(self.position, frozen=frozen)
        logger.info("the first %d blocks are frozen after step %d", frozen, self.position.step)
        self._report_frozen_layers()

    def _report_frozen_layers(self) -> None:
        """Blocks are what the control plane calls layers: both count neither embedding nor head."""
        if self.position.frozen > self._session.frozen_layers:
            self._session.set_frozen_layers(self.position.frozen)

    def _step_optimizers(self) -> None:
        self._set_learning_rate(self.position.step)
        for optimizer in self._optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def _set_learning_rate(self, step: int) -> None:
        rate = self._learning_rate.rate_at(step) * math.prod(change.factor for change in self._batch_changes)
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _optimizers(self) -> list[Optimizer]:
        return [optimizer for part in self._parts for optimizer in part.optimizers]

    def _reduce_loss(self, share: torch.Tensor) -> float:
        """The mean over the global batch, from each rank's share of it."""
        counted = share if self._batches.counts_loss else torch.zeros_like(share)
        dist.all_reduce(counted)
        loss = counted.item()
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {self.position.step + 1} is {loss}; a lower --learning-rate may help")
        return loss

    def _build_manifest(self) -> Manifest:
        return Manifest(self.position, dist.get_world_size(), self._training_identity(), (), self._batch_changes)

    def _training_identity(self) -> dict[str, str | int | float]:
        """What must not change between generations, or the losses would not be those of one training."""
        chosen = self._settings
        return {
            "model": chosen.model,
            "dtype": chosen.dtype,
            "seed": chosen.seed,
            "learning_rate": chosen.learning_rate,
            "warmup_steps": chosen.warmup_steps,
            "decay": chosen.decay,
            "windows": self._batches.window_count,
            "global_batch": self._layout.global_batch,
        }

    def _record_digest(self, event: str) -> None:
        if self._ledger.is_enabled and self._settings.ledger_digests:
            self._ledger.record_state(self.position.step, event, digest=compute_global_digest(self._parts))


def _log_failed_save(failure: CheckpointError) -> None:
    logger.error("%s; the training goes on from its last complete checkpoint if it dies now", failure)


def _validate_frozen_blocks(session: Session, settings: TrainerSettings, blocks: int) -> None:
    for source, frozen in (
        ("freeze", max((count for _, count in settings.freeze), default=0)),
        ("EBBTIDE_FROZEN_LAYERS", session.frozen_layers),
    ):
        if frozen > blocks:
            raise ValueError(f"{source} is {frozen}, it must be at most {blocks}, the blocks of {settings.model}")


def _select_plan(session: Session, settings: TrainerSettings) -> ParallelPlan:
    """The session's plan, with the global batch that the settings ask for."""
    if session.plan is None:
        return make_data_parallel_plan(
            replicas=session.world_size, global_batch=settings.global_batch or _DEFAULT_GLOBAL_BATCH
        )
    plan, wanted = session.plan, settings.global_batch
    if wanted == 0:
        return plan
    if wanted % plan.micro_batches:
        raise ValueError(
            f"global batch is {wanted}, it must be a multiple of the plan's {plan.micro_batches} micro-batches"
        )
    return replace(plan, micro_batch_size=wanted // plan.micro_batches)


def _parse_dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "float64": torch.float64}
    if name not in known:
        raise ValueError(f"dtype is {name!r}, allowed are {', '.join(known)}")
    return known[name]
