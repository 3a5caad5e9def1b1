"""The reference trainer: the training loop of a GPT under any parallel plan, with notices, checkpoints and freezing."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.session import Session
from scheduler.domain.job_records import LoadTraffic
from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import BatchChange, CheckpointError, Manifest, TrainingPosition
from scheduler.trainer.engine import TrainingEngine
from scheduler.trainer.frozen_outputs import FrozenOutputStore
from scheduler.trainer.layout import Layout, build_layout
from scheduler.trainer.model import get_model_size
from scheduler.trainer.optimizer import LearningRateSchedule
from scheduler.trainer.settings import (
    TrainerSettings,
    build_identity,
    read_sample_lengths,
    select_plan,
    validate_frozen_blocks,
    validate_settings,
)
from scheduler.trainer.training_state import Ledger, collect_state, compute_global_digest, restore_state
from scheduler.trainer.user_code import EvaluationHook, load_function

logger = logging.getLogger(__name__)
_LOG_PERIOD_S = 5.0
_DEFAULT_KEEP = 2


def train(session: Session, settings: TrainerSettings) -> None:
    """Train to the last step, or until a notice requires to exit.

    Raises:
        ValueError: settings, plan and checkpoint do not fit together; the message names the values.
    """
    steps = settings.steps or session.steps_total
    if steps < 1:
        raise ValueError("The number of steps is 0. Set `--steps` or `EBBTIDE_STEPS` to 1 or more.")
    # Validate before the ranks wait for each other in init_process_group.
    block_count = get_model_size(settings.model).layers
    validate_settings(settings)
    validate_frozen_blocks(session, settings, block_count)
    layout = build_layout(select_plan(session, settings), world_size=session.world_size, block_count=block_count)
    lengths = read_sample_lengths(settings, layout)
    torch.set_num_threads(1)
    session.init_process_group()
    keep = settings.keep or session.checkpoint_keep or _DEFAULT_KEEP
    trainer = Trainer(session, replace(settings, steps=steps, keep=keep), layout, lengths)
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
        if settings.evaluate_every and trainer.position.step % settings.evaluate_every == 0:
            trainer.evaluate()
        if settings.checkpoint_every and trainer.position.step % settings.checkpoint_every == 0:
            trainer.save_in_background()
    trainer.save()
    session.succeed()


class Trainer:
    """The training of one rank: its engine, its position, and its checkpoints."""

    def __init__(
        self, session: Session, settings: TrainerSettings, layout: Layout, lengths: tuple[int, ...] = ()
    ) -> None:
        # Blocks that are frozen from the start are built so, because rebuilding would add an Adam step.
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
        self._save_resources = checkpoint.BackgroundSaveResources(copies_asynchronously=session.device != "cpu")
        self._background_save: checkpoint.BackgroundSave | None = None
        self._logged_at_s = float("-inf")
        self._engine = TrainingEngine(settings, layout, rank=session.rank, device=session.device, lengths=lengths)
        torch.manual_seed(settings.seed)
        self._evaluation_hook: EvaluationHook | None = None
        if settings.evaluation_hook:
            self._evaluation_hook = load_function("--evaluation-hook", settings.evaluation_hook)
        self._ledger = Ledger(settings.ledger_dir, generation=session.generation, rank=session.rank)
        self._frozen_store: FrozenOutputStore | None = None
        if settings.frozen_cache is not None:
            identity = {name: value for name, value in self._training_identity().items() if name != "global_batch"}
            self._frozen_store = FrozenOutputStore(settings.frozen_cache, identity)

    def resume(self) -> None:
        """Build the model and load the newest complete checkpoint, if there is one.

        The number of frozen blocks is the larger of the control plane's and the checkpoint's. A larger number in the
        checkpoint is reported.
        """
        root, manifest, traffic = self._checkpoint_root, None, None
        if root is not None:
            # Look before creating anything: a directory that has vanished must not come back empty.
            manifest = checkpoint.find_latest(root)
            if manifest is None:
                checkpoint.reject_lost_checkpoint(root, step=self._session.checkpoint_step)
            checkpoint.require_writable(root)
        if root is not None and manifest is not None:
            self._warn_if_older(manifest.position.step)
            traffic = self._load_newest_checkpoint(root, manifest)
            self._record_digest("loaded")
        else:
            self._open_frozen_store(valid_blocks=0)
            self._engine.build(frozen_blocks=self.position.frozen, frozen_store=self._frozen_store)
        if root is not None:
            checkpoint.remove_unfinished(root)
        self._report_frozen_layers()
        self._session.mark_resumed(self.position.step, traffic)

    def _warn_if_older(self, step: int) -> None:
        saved = self._session.checkpoint_step
        if step < saved:
            message = "The job has saved step %d, but the newest complete checkpoint is of step %d. Repeating %d steps."
            logger.warning(message, saved, step, saved - step)

    def train_step(self) -> None:
        """Run forward, backward and one optimizer step on this rank's share.

        Report the mean loss of the global batch.
        """
        started_at_s = time.perf_counter()
        self._freeze_if_due()
        frozen_outputs = self._engine.frozen_outputs
        if frozen_outputs is not None:
            frozen_outputs.begin_step(self.position.samples)
        loss = self._engine.run_step(
            self.position.samples,
            learning_rate=self._learning_rate_at(self.position.step),
            before_update=self._wait_for_copy,
        )
        if not math.isfinite(loss):
            self._session.report(step=self.position.step, loss=loss)
            raise ValueError(f"The loss of step {self.position.step + 1} is {loss}. Try a lower `--learning-rate`.")
        if frozen_outputs is not None:
            frozen_outputs.finish_step()
        time.sleep(self._settings.step_delay_s)
        batch = self._layout.global_batch
        self._ledger.record_step(
            self.position.step + 1, samples=self._engine.batches.owned_samples(self.position.samples), loss=loss
        )
        self.position = replace(self.position, step=self.position.step + 1, samples=self.position.samples + batch)
        now_s = time.perf_counter()
        samples_per_s = batch / (now_s - started_at_s)
        self._session.report(step=self.position.step, loss=loss, samples_per_s=samples_per_s)
        if now_s - self._logged_at_s >= _LOG_PERIOD_S:
            self._logged_at_s = now_s
            logger.info("step %d: loss %.4f, %.1f samples/s", self.position.step, loss, samples_per_s)
        if self._background_save is not None and self._background_save.is_done:
            self._finish_background_save()

    def evaluate(self) -> None:
        """Record the loss on the evaluation data, and pass it to the evaluation hook. Collective."""
        self._session.heartbeat()
        step, loss = self.position.step, self._engine.evaluate()
        logger.info("step %d: evaluation loss %.4f", step, loss)
        self._ledger.record_evaluation(step, loss=loss)
        if self._evaluation_hook is not None and self._session.rank == 0:
            self._evaluation_hook(step, loss)
        self._session.heartbeat()

    def save_in_background(self) -> None:
        """Start to save the current step in the background. Wait first for a save that is still running."""
        if self._checkpoint_root is None or not self._is_unsaved():
            return
        started_at_s = time.perf_counter()
        self._finish_background_save()
        try:
            self._background_save = checkpoint.BackgroundSave(
                self._checkpoint_root,
                self._engine.parts,
                self._build_manifest(),
                node=self._session.node,
                keep=self._settings.keep,
                resources=self._save_resources,
            )
        except CheckpointError as error:
            _log_failed_save(error)
            return
        blocked_s = time.perf_counter() - started_at_s
        logger.info("Saving step %d blocked training for %.3f s", self.position.step, blocked_s)
        self._record_digest("saved")

    def save(self) -> None:
        """Save the current step, unless it is saved, is step 0, or there is no checkpoint directory."""
        self._finish_background_save()
        if self._checkpoint_root is None or not self._is_unsaved():
            return
        with self._session.saving(self.position.step):
            checkpoint.save(
                self._checkpoint_root,
                self._engine.parts,
                self._build_manifest(),
                node=self._session.node,
                keep=self._settings.keep,
            )
        self._record_digest("saved")

    def _wait_for_copy(self) -> None:
        """Wait until a background save has its copy of the state, which is about to change."""
        if self._background_save is not None:
            self._background_save.wait_for_copy()

    def _finish_background_save(self) -> None:
        """Wait for the background save. If it has failed, training continues and the next save tries again."""
        if self._background_save is not None:
            background_save, self._background_save = self._background_save, None
            try:
                background_save.wait()
            except CheckpointError as error:
                _log_failed_save(error)
            else:
                self._session.mark_saved(background_save.step)

    def _is_unsaved(self) -> bool:
        return self.position.step > 0 and self._session.status.checkpoint_step != self.position.step

    def _open_frozen_store(self, *, valid_blocks: int) -> None:
        if self._frozen_store is not None:
            self._frozen_store.open(valid_blocks=valid_blocks)

    def _load_newest_checkpoint(self, root: Path, manifest: Manifest) -> LoadTraffic:
        """Load the checkpoint, or the newest before it that is not damaged."""
        while True:
            try:
                return self._load_checkpoint(root, manifest)
            except DamagedCheckpointError as error:
                manifest = checkpoint.fall_back(root, manifest, error)
                self._warn_if_older(manifest.position.step)

    def _load_checkpoint(self, root: Path, manifest: Manifest) -> LoadTraffic:
        position = manifest.position
        frozen = max(position.frozen, self.position.frozen)
        self._open_frozen_store(valid_blocks=position.frozen)
        self._engine.build(frozen_blocks=frozen, for_loading=True, frozen_store=self._frozen_store)
        batch = int(manifest.settings["global_batch"])
        changes = manifest.batch_changes + self._check_batch_change(position.step, batch)
        identity = {**self._training_identity(), "global_batch": batch}
        traffic = checkpoint.load(root, manifest, self._engine.parts, settings=identity, node=self._session.node)
        self.position, self._batch_changes = replace(position, frozen=frozen), changes
        # Checkpoints hold tensors only; the learning rate follows from the position.
        self._engine.set_learning_rate(self._learning_rate_at(position.step - 1))
        return traffic

    def _check_batch_change(self, step: int, before: int) -> tuple[BatchChange, ...]:
        """Return the change of the global batch since the checkpoint, if any.

        Raises:
            CheckpointError: the batch has changed, and no rule scales the learning rate.
        """
        after, rule = self._layout.global_batch, self._settings.batch_rule
        if before == after:
            return ()
        try:
            factor = rule.compute_factor(before, after)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        message = "The global batch changes from %d to %d after step %d. Learning rate x %.4g (rule: %s)."
        logger.warning(message, before, after, step, factor, rule)
        return (BatchChange(step, before, after, rule, factor),)

    def _freeze_if_due(self) -> None:
        """Rebuild the model around the current state when more blocks freeze.

        The optimizers must drop the parameters of frozen blocks.
        """
        frozen = self._settings.frozen_blocks_at(self.position.step)
        if frozen <= self.position.frozen:
            return
        state = collect_state(self._engine.parts)
        self._open_frozen_store(valid_blocks=self.position.frozen)
        self._engine.build(frozen_blocks=frozen, for_loading=True, frozen_store=self._frozen_store)
        restore_state(self._engine.parts, state)
        self.position = replace(self.position, frozen=frozen)
        logger.info("Froze the first %d blocks after step %d", frozen, self.position.step)
        self._report_frozen_layers()

    def _report_frozen_layers(self) -> None:
        """Report frozen blocks. The control plane calls blocks layers; both exclude embedding and head."""
        if self.position.frozen > self._session.frozen_layers:
            self._session.set_frozen_layers(self.position.frozen)

    def _learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the step after `step` completed steps, scaled for changes of the batch."""
        return self._learning_rate.rate_at(step) * math.prod(change.factor for change in self._batch_changes)

    def _build_manifest(self) -> Manifest:
        return Manifest(self.position, dist.get_world_size(), self._training_identity(), (), self._batch_changes)

    def _training_identity(self) -> dict[str, str | int | float]:
        """Return the settings that must not change between generations.

        Otherwise the losses would not be comparable.
        """
        return {
            **build_identity(self._settings),
            "windows": self._engine.batches.window_count,
            "global_batch": self._layout.global_batch,
            **({"lengths": self._engine.varied.digest} if self._engine.varied is not None else {}),
        }

    def _record_digest(self, event: str) -> None:
        if self._ledger.is_enabled and self._settings.ledger_digests:
            self._ledger.record_state(self.position.step, event, digest=compute_global_digest(self._engine.parts))


def _log_failed_save(error: CheckpointError) -> None:
    logger.error("%s Training continues; the last complete checkpoint remains.", error)
