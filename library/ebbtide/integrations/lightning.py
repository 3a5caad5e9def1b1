"""Lightning: one callback.

elastic = ElasticCallback()
trainer = Trainer(callbacks=[elastic], **elastic.ranks)
trainer.fit(model, loader, ckpt_path=elastic.checkpoint)
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ebbtide.integrations import require_framework

require_framework("lightning")

import lightning.pytorch as pl
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from ebbtide.global_batches import (
    BatchDivision,
    GlobalSampler,
    PositionedLoader,
    RankBatchSampler,
    divide_global_batch,
    find_sampler,
    read_batch_size,
)
from ebbtide.integrations.complete_checkpoints import (
    BatchRecord,
    CheckpointRecord,
    check_record,
    choose_global_batch,
    digest_model,
)
from ebbtide.integrations.framework_checkpoints import FrameworkCheckpoints
from ebbtide.integrations.framework_session import FrameworkSession
from ebbtide.integrations.lightning_counts import scale_counts
from ebbtide.random_state import mix_seed
from ebbtide.training_state import Position, PositionState

_PATTERN = "step-*.ckpt"
_COUNTERS = ("ready", "started", "processed", "completed")


class ElasticCallback(pl.Callback):
    """Lets a Lightning Trainer take part in resizes.

    At the end of each step it acts on notices: it saves a checkpoint of Lightning, and the process ends if it has to.
    The global batch stays the same on any number of ranks: the batch size of the training loader and
    `accumulate_grad_batches` follow. A validation and the end of an epoch that are due when the process has to end are
    made up for at the next start. Each rank continues its random numbers, and a rank that is new starts its own.

    Lightning calls it after all other callbacks, so that their state is saved too.

    Args:
        folder: directory of the checkpoints. Under Ebbtide, a relative one is in the job's checkpoint directory.
        global_batch: samples of all ranks per step. Default: as at the first start of the training.

    Attributes:
        checkpoint: path of the newest complete checkpoint for `trainer.fit(ckpt_path=...)`, or None.
        ranks: the arguments `devices` and `num_nodes` of a Trainer that uses all ranks of the job.
    """

    def __init__(self, folder: str | Path = "elastic-checkpoints", *, global_batch: int = 0) -> None:
        super().__init__()
        self._run = FrameworkSession()
        self._terminate = signal.getsignal(signal.SIGTERM)
        checkpoint_dir = self._run.session.checkpoint_dir
        self._checkpoints = FrameworkCheckpoints(
            (checkpoint_dir or Path()) / folder, _PATTERN, nonfinite_folder=checkpoint_dir
        )
        self._asked_batch = global_batch
        self._found = self._checkpoints.find_usable()
        self._random = PositionState(Position(seed=_read_seed()))
        self._owes_validation = False
        self._batch: BatchRecord | None = None
        self._division = BatchDivision(1, 1)
        self._batches: RankBatchSampler | None = None
        self._model = ""
        self._step = 0
        self.checkpoint = None if self._found is None else str(self._found[0])
        self.ranks = {
            "devices": int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
            "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE") or 1),
        }

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"`{type(pl_module).__name__}.automatic_optimization` is False. Set it to True: with manual "
                "optimization, Lightning cannot accumulate gradients, so the global batch would change with the ranks."
            )
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
        self._model = digest_model(pl_module)
        if self._found is not None:
            check_record(*self._found, model=self._model, framework="lightning", version=pl.__version__)
        process = trainer.strategy.process_dataloader

        def divide_and_process(loader: object) -> object:
            return process(self._divide_loader(trainer, loader) if trainer.training else loader)

        trainer.strategy.process_dataloader = divide_and_process

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        if self._found is not None and self._step != self._found[1].step:
            raise ValueError(
                f"{self.checkpoint} is the newest checkpoint, but the training starts from step {self._step}. "
                "Call trainer.fit(..., ckpt_path=elastic.checkpoint)."
            )
        if self._found is not None:
            self._seek(trainer, self._found[1])
            fresh_seed = mix_seed(_read_seed(), self._step, trainer.global_rank)
            self._random.restore_random_state(trainer.global_rank, fresh_seed)
        if trainer.is_global_zero:
            self._checkpoints.clean_up()
        if callable(self._terminate):
            # Lightning ends without a checkpoint on SIGTERM. The session makes it a notice instead.
            signal.signal(signal.SIGTERM, self._terminate)
        self._run.session.mark_resumed(self._step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are accumulated
        self._step = trainer.global_step
        notice = self._run.end_step(self._step, loss=self._run.read_loss(_find_loss(trainer)))
        if notice is None:
            return
        is_last = 0 <= trainer.max_steps <= self._step  # Lightning would not come back to the end of the epoch
        leaves = notice.requires_exit and not is_last
        if leaves:
            # Lightning calls it after the callbacks. What it changes belongs into the checkpoint.
            pl_module.on_train_batch_end(outputs, batch, batch_idx)
        self._save(trainer)
        if leaves:
            self._run.session.leave()
            raise SIGTERMException  # Lightning's own way to end in time: loggers write what they have

    def on_validation_batch_end(self, *_: Any) -> None:
        self._run.session.heartbeat()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run.finish()

    def state_dict(self) -> dict[str, Any]:
        return self._random.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._random.load_state_dict(state_dict)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._owes_validation:
            # Lightning counts the batch as completed once the callbacks are done. It then continues after the batch.
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            for counts in (progress["current"], progress["total"]):
                counts["completed"] = counts["processed"]

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._run.fail(exception)

    def _divide_loader(self, trainer: pl.Trainer, loader: object) -> object:
        """Return the training loader with this rank's share of the global batches."""
        if not isinstance(loader, DataLoader):
            raise ValueError(f"The training loader is a {type(loader).__name__}. Use one torch.utils.data.DataLoader.")
        ranks = trainer.distributed_sampler_kwargs or {}
        world_size, rank = ranks.get("num_replicas", 1), ranks.get("rank", 0)
        sampler, micro_batch = find_sampler(loader), read_batch_size(loader)
        if self._batch is None:
            self._batch = choose_global_batch(
                self._asked_batch,
                None if self._found is None else self._found[1].batch,
                rank_batch=micro_batch * trainer.accumulate_grad_batches,
                world_size=world_size,
            )
            self._division = divide_global_batch(
                self._batch.global_batch, world_size=world_size, micro_batch_max=micro_batch
            )
        order = GlobalSampler(
            sampler, global_batch=self._batch.global_batch, seed=_read_seed(), drop_last=loader.drop_last
        )
        if self._batches is None:
            asked, passes = trainer.accumulate_grad_batches, self._division.accumulate
            scale_counts(trainer, steps_per_epoch=order.count_batches(), asked=asked, passes=passes)
            trainer.accumulate_grad_batches = passes
        self._batches = RankBatchSampler(order, self._division, rank=rank, world_size=world_size)
        return PositionedLoader.replace(loader, self._batches)

    def _seek(self, trainer: pl.Trainer, record: CheckpointRecord) -> None:
        """Continue with the next step: express Lightning's counts in the present micro-batches."""
        assert self._batches is not None, "Lightning processes the training loader first"
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        before, now = record.position["accumulate"], self._division.accumulate
        progress = epoch_loop.batch_progress
        for counts in (progress.current, progress.total):
            # All four counts are within one of each other at the end of a batch.
            change = counts.ready // before * now - counts.ready
            for name in _COUNTERS:
                setattr(counts, name, getattr(counts, name) + change)
        ends_epoch = record.position.get("ends_epoch", 0)
        self._batches.set_epoch(record.position["epoch"])
        self._batches.skip_steps(self._batches.sampler.count_batches() if ends_epoch else record.position["epoch_step"])
        # Workers of the loader may have begun at the first sample.
        iter(fit_loop._data_fetcher)
        # Lightning then validates before it trains, if the validation is due.
        epoch_loop.val_loop.restarting = False
        epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        if ends_epoch and not epoch_loop._should_check_val_fx(fit_loop._data_fetcher):
            epoch_loop._batches_that_stepped += 1  # as after a batch, which this epoch has none left of

    def _save(self, trainer: pl.Trainer) -> None:
        assert self._batch is not None
        path = self._checkpoints.folder / f"step-{self._step}.ckpt"
        epoch_loop = trainer.fit_loop.epoch_loop
        ends_epoch = epoch_loop._num_ready_batches_reached()
        self._run.begin_saving(self._step)
        self._random.collect()
        self._owes_validation = ends_epoch or epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        trainer.save_checkpoint(path)
        self._owes_validation = False
        self._checkpoints.complete(path, self._describe(trainer, self._batch, ends_epoch=ends_epoch))
        if trainer.is_global_zero:
            self._checkpoints.remove_old(self._run.session.checkpoint_keep)
        self._run.end_saving(self._step)

    def _describe(self, trainer: pl.Trainer, batch: BatchRecord, *, ends_epoch: bool) -> CheckpointRecord:
        accumulate = self._division.accumulate
        position = {
            "accumulate": accumulate,
            "epoch": trainer.current_epoch,
            "epoch_step": trainer.fit_loop.epoch_loop.batch_progress.current.ready // accumulate,
            "ends_epoch": int(ends_epoch),
        }
        return CheckpointRecord(self._step, batch, self._model, "lightning", pl.__version__, position)


def _find_loss(trainer: pl.Trainer) -> Any:
    """Return the loss that the module logs as `train_loss` or `loss`, None without one."""
    metrics = trainer.callback_metrics
    return metrics.get("train_loss", metrics.get("loss"))


def _read_seed() -> int:
    """Return the seed of `seed_everything`, 0 without it."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)
