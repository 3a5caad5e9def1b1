"""The reference trainer: the training loop of a GPT on the bundled text, under any parallel plan."""

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

from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.session import Session
from scheduler.domain.job_records import LoadTraffic
from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json
from scheduler.solver.lengths.histogram import read_lengths
from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import BatchChange, CheckpointError, Manifest, TrainingPosition
from scheduler.trainer.dataset import BatchLoader
from scheduler.trainer.frozen_outputs import FrozenOutputCache, FrozenOutputStore
from scheduler.trainer.layout import Layout, build_layout, make_data_parallel_plan
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import get_model_size
from scheduler.trainer.model_parts import BuildOptions, build_model_parts
from scheduler.trainer.optimizer import BatchScalingRule, LearningRateDecay, LearningRateSchedule, build_optimizers
from scheduler.trainer.pipeline import build_forward_backward
from scheduler.trainer.training_state import Ledger, TrainablePart, collect_state, compute_global_digest, restore_state
from scheduler.trainer.varied_lengths import VariedLengthBatches, require_data_parallel

logger = logging.getLogger(__name__)
_LOG_PERIOD_S = 5.0

_DEFAULT_GLOBAL_BATCH = 12
_DEFAULT_KEEP = 2


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of a training; `train.py` has one command-line option for each.

    Attributes:
        steps: 0 means the job's number of steps.
        global_batch: samples per step; 0 means the plan's.
        checkpoint_every: steps between checkpoints; 0 means the job's checkpoint interval.
        keep: number of complete checkpoints to keep; 0 means the job's.
        freeze: pairs (step, blocks): from that step on, the first `blocks` blocks are frozen.
        frozen_cache: directory for the outputs of frozen blocks, shared by all ranks; None computes them in each step.
        ledger_digests: record a digest of the whole state at each save and load. Every rank needs memory for the state.
        lengths: file of sample lengths in tokens; None gives all samples the model's length.
    """

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
    frozen_cache: Path | None = None
    step_delay_s: float = 0.0
    ledger_dir: Path | None = None
    ledger_digests: bool = False
    lengths: Path | None = None

    def frozen_blocks_at(self, step: int) -> int:
        """Return how many blocks are frozen at `step`."""
        return max((blocks for begin, blocks in self.freeze if begin <= step), default=0)


def build_settings(options: Mapping[str, Any]) -> TrainerSettings:
    """Return the settings of the parsed command-line options."""
    named = {"batch_rule": BatchScalingRule(options["batch_rule"]), "decay": LearningRateDecay(options["decay"])}
    return TrainerSettings(**{**options, **named})


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
    _validate_frozen_blocks(session, settings, block_count)
    layout = build_layout(_select_plan(session, settings), world_size=session.world_size, block_count=block_count)
    lengths = _read_lengths(settings, layout)
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
        if settings.checkpoint_every and trainer.position.step % settings.checkpoint_every == 0:
            trainer.save_in_background()
    trainer.save()
    session.succeed()


class Trainer:
    """Model, optimizers, data and position of one rank."""

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
        self._meshes = build_meshes(layout, device=session.device)
        self._save_resources = checkpoint.BackgroundSaveResources()
        self._background_save: checkpoint.BackgroundSave | None = None
        self._logged_at_s = float("-inf")
        size = get_model_size(settings.model)
        self._batches = BatchLoader(layout, size=size, rank=session.rank, seed=settings.seed, device=session.device)
        self._varied = VariedLengthBatches(lengths, layout, size=size, seed=settings.seed) if lengths else None
        torch.manual_seed(settings.seed)
        self._ledger = Ledger(settings.ledger_dir, generation=session.generation, rank=session.rank)
        self._frozen_store: FrozenOutputStore | None = None
        if settings.frozen_cache is not None:
            identity = {name: value for name, value in self._training_identity().items() if name != "global_batch"}
            self._frozen_store = FrozenOutputStore(settings.frozen_cache, identity)
        self._frozen_outputs: FrozenOutputCache | None = None

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
            self._build_model(frozen_blocks=self.position.frozen)
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
        if self._frozen_outputs is not None:
            self._frozen_outputs.begin_step(self.position.samples)
        share = self._run_batch()
        self._step_optimizers()
        loss = self._reduce_loss(share)
        if self._frozen_outputs is not None:
            self._frozen_outputs.finish_step()
        time.sleep(self._settings.step_delay_s)
        batch = self._layout.global_batch
        self._ledger.record_step(
            self.position.step + 1, samples=self._batches.owned_samples(self.position.samples), loss=loss
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

    def _run_batch(self) -> torch.Tensor:
        """Run forward and backward passes, and return this rank's share of the loss."""
        if self._varied is not None:
            return self._varied.run(self._first_model, self.position.samples)
        return self._forward_backward(*self._batches.load_batch(self.position.samples))

    def save_in_background(self) -> None:
        """Start to save the current step in the background. Wait first for a save that is still running."""
        if self._checkpoint_root is None or not self._is_unsaved():
            return
        started_at_s = time.perf_counter()
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
                self._parts,
                self._build_manifest(),
                node=self._session.node,
                keep=self._settings.keep,
            )
        self._record_digest("saved")

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

    def _build_model(self, *, frozen_blocks: int = 0, for_loading: bool = False) -> None:
        """Build the model parts and optimizers, with initial weights unless they are loaded afterwards. Collective."""
        settings, session = self._settings, self._session
        options = BuildOptions(
            size=get_model_size(settings.model),
            rank=session.rank,
            device=session.device,
            seed=settings.seed,
            dtype=_parse_dtype(settings.dtype),
            frozen_blocks=frozen_blocks,
            for_loading=for_loading,
        )
        parts = build_model_parts(self._layout, self._meshes, options)
        self._parts = tuple(
            TrainablePart(
                part.module,
                build_optimizers(part, self._layout, learning_rate=settings.learning_rate, for_loading=for_loading),
            )
            for part in parts
        )
        self._first_model = parts[0].model
        self._forward_backward = build_forward_backward(self._layout, self._meshes, parts, options)
        if self._frozen_store is not None and frozen_blocks:
            cache = FrozenOutputCache(self._frozen_store, self._layout, options, self._batches.find_window)
            for part in parts:
                part.model.output_cache = cache.connect(part.model.layer_range)
            self._frozen_outputs = cache

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
        self._build_model(frozen_blocks=frozen, for_loading=True)
        batch = int(manifest.settings["global_batch"])
        changes = manifest.batch_changes + self._check_batch_change(position.step, batch)
        identity = {**self._training_identity(), "global_batch": batch}
        traffic = checkpoint.load(root, manifest, self._parts, settings=identity, node=self._session.node)
        self.position, self._batch_changes = replace(position, frozen=frozen), changes
        # Checkpoints hold tensors only; the learning rate follows from the position.
        self._set_learning_rate(position.step - 1)
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
        state = collect_state(self._parts)
        self._open_frozen_store(valid_blocks=self.position.frozen)
        self._build_model(frozen_blocks=frozen, for_loading=True)
        restore_state(self._parts, state)
        self.position = replace(self.position, frozen=frozen)
        logger.info("Froze the first %d blocks after step %d", frozen, self.position.step)
        self._report_frozen_layers()

    def _report_frozen_layers(self) -> None:
        """Report frozen blocks. The control plane calls blocks layers; both exclude embedding and head."""
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
        """Return the mean over the global batch from each rank's share. Collective."""
        total = share if self._batches.counts_loss else torch.zeros_like(share)
        dist.all_reduce(total)
        loss = total.item()
        if not math.isfinite(loss):
            self._session.report(step=self.position.step, loss=loss)
            raise ValueError(f"The loss of step {self.position.step + 1} is {loss}. Try a lower `--learning-rate`.")
        return loss

    def _build_manifest(self) -> Manifest:
        return Manifest(self.position, dist.get_world_size(), self._training_identity(), (), self._batch_changes)

    def _training_identity(self) -> dict[str, str | int | float]:
        """Return the settings that must not change between generations.

        Otherwise the losses would not be comparable.
        """
        settings = self._settings
        return {
            "model": settings.model,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "learning_rate": settings.learning_rate,
            "warmup_steps": settings.warmup_steps,
            "decay": settings.decay,
            "windows": self._batches.window_count,
            "global_batch": self._layout.global_batch,
            **({"lengths": self._varied.digest} if self._varied is not None else {}),
        }

    def _record_digest(self, event: str) -> None:
        if self._ledger.is_enabled and self._settings.ledger_digests:
            self._ledger.record_state(self.position.step, event, digest=compute_global_digest(self._parts))


def _log_failed_save(error: CheckpointError) -> None:
    logger.error("%s Training continues; the last complete checkpoint remains.", error)


def _read_lengths(settings: TrainerSettings, layout: Layout) -> tuple[int, ...]:
    """Return the lengths of the samples, or nothing if all have the model's length.

    Raises:
        ValueError: the file is invalid, or the settings do not allow unlike lengths.
    """
    if settings.lengths is None:
        return ()
    require_data_parallel(layout)
    if settings.freeze or settings.frozen_cache is not None:
        raise ValueError("`--lengths` cannot be combined with `--freeze` or `--frozen-cache`. Remove one of them.")
    return read_lengths(settings.lengths, context=get_model_size(settings.model).sequence)


def _validate_frozen_blocks(session: Session, settings: TrainerSettings, block_count: int) -> None:
    for source, frozen in (
        ("--freeze", max((blocks for _, blocks in settings.freeze), default=0)),
        ("EBBTIDE_FROZEN_LAYERS", session.frozen_layers),
    ):
        if frozen > block_count:
            raise ValueError(
                f"`{source}` freezes {frozen} blocks, but {settings.model} has {block_count}. "
                f"Freeze {block_count} or fewer."
            )


def _select_plan(session: Session, settings: TrainerSettings) -> ParallelPlan:
    """Return the session's plan with the configured global batch."""
    if session.plan is None:
        return make_data_parallel_plan(
            replicas=session.world_size, global_batch=settings.global_batch or _DEFAULT_GLOBAL_BATCH
        )
    plan, global_batch = plan_from_json(session.plan), settings.global_batch
    if global_batch == 0:
        return plan
    if global_batch % plan.micro_batches:
        raise ValueError(
            f"`--global-batch` is {global_batch}, but the plan has {plan.micro_batches} micro-batches. "
            f"Use a multiple of {plan.micro_batches}."
        )
    return replace(plan, micro_batch_size=global_batch // plan.micro_batches)


def _parse_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    if name not in dtypes:
        raise ValueError(f"`dtype` is {name!r}. Accepted values: {', '.join(dtypes)}.")
    return dtypes[name]
