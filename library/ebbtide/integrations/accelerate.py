"""Accelerate: one wrapper around the training loader.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
loader = ElasticLoader(accelerator, loader)
for epoch in range(epochs):
    for batch in loader:
        with accelerator.accumulate(model):
            ...
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebbtide.integrations import require_framework

require_framework("accelerate")

import accelerate
import torch
from accelerate.utils import broadcast_object_list, send_to_device
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from ebbtide.global_batches import (
    GlobalSampler,
    PositionedLoader,
    RankBatchSampler,
    divide_global_batch,
    find_sampler,
    read_batch_size,
)
from ebbtide.integrations.complete_checkpoints import (
    CheckpointRecord,
    check_record,
    choose_global_batch,
    digest_model,
)
from ebbtide.integrations.framework_checkpoints import FrameworkCheckpoints
from ebbtide.integrations.framework_session import FrameworkSession
from ebbtide.notice import Notice

_PATTERN = "step-*"


class ElasticLoader:
    """Lets a loop with Accelerate take part in resizes.

    It restores the newest complete checkpoint when it is created. Each pass over it is one epoch: passes that the
    checkpoint has behind it are empty, and the next one continues with the next batch. At the end of each step it acts
    on notices: Accelerate saves its state, and the process ends if it has to.

    The global batch stays the same on any number of ranks: the batch size and the accelerator's
    `gradient_accumulation_steps` follow, so the loop must use `accelerator.accumulate`.

    Args:
        loader: the prepared training loader.
        folder: directory of the checkpoints. Under Ebbtide, a relative one is in the job's checkpoint directory.
        global_batch: samples of all ranks per step. Default: as at the first start of the training.

    Attributes:
        step: number of completed steps.

    Raises:
        ValueError: the loop cannot be resized; the message names the argument.
        CheckpointMismatchError: the newest checkpoint is of another model or version.
        DamagedCheckpointError: all checkpoints are damaged.
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        loader: DataLoader[Any],
        *,
        folder: str | Path = "elastic-checkpoints",
        global_batch: int = 0,
    ) -> None:
        if accelerator.project_configuration.automatic_checkpoint_naming:
            raise ValueError(
                "`ProjectConfiguration.automatic_checkpoint_naming` is True. Set it to False: checkpoints are named "
                "after their step."
            )
        self._run = FrameworkSession()
        self._accelerator = accelerator
        checkpoint_dir = self._run.session.checkpoint_dir
        self._checkpoints = FrameworkCheckpoints(
            (checkpoint_dir or Path()) / folder, _PATTERN, nonfinite_folder=checkpoint_dir
        )
        self._model = "+".join(digest_model(accelerator.unwrap_model(each)) for each in accelerator._models)
        found = self._checkpoints.find_usable()
        if found is not None:
            check_record(*found, model=self._model, framework="accelerate", version=accelerate.__version__)
        record = None if found is None else found[1]
        self._divide_batch(loader, record, asked=global_batch)
        self.step = 0 if record is None else record.step
        self._epoch = 0
        self._start_epoch = self._start_step = 0
        if found is not None:
            self._restore(*found)
        if accelerator.is_main_process:
            self._checkpoints.clean_up()
        self._loss: torch.Tensor | None = None
        self._has_trained = False  # the last batch has completed a step
        self._watch_loss()
        self._run.session.mark_resumed(self.step)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the next epoch.

        Raises:
            ValueError: the loop does not use `accelerator.accumulate`.
        """
        epoch, self._epoch = self._epoch, self._epoch + 1
        if epoch < self._start_epoch:
            return
        first_step = self._start_step if epoch == self._start_epoch else 0
        self._batches.set_epoch(epoch)
        self._batches.skip_steps(first_step)
        steps_per_epoch = len(self._batches) // self._accumulate
        try:
            for number, batch in enumerate(self._loader, start=1):
                self._has_trained = False
                yield send_to_device(batch, self._accelerator.device, non_blocking=True)
                if self._completes_step(number):
                    epoch_step = first_step + number // self._accumulate
                    self._end_step(*divmod(epoch * steps_per_epoch + epoch_step, steps_per_epoch))
        except GeneratorExit:  # the loop has ended with `break`
            self._count_last_step()
            raise
        finally:
            self._run.finish()

    def __len__(self) -> int:
        """Return the number of this rank's batches per epoch."""
        return len(self._batches)

    def _completes_step(self, number: int) -> bool:
        is_boundary = number % self._accumulate == 0
        if is_boundary != self._accelerator.sync_gradients:
            raise ValueError(
                f"A step now takes {self._accumulate} batches per rank, but the loop updates the model after another "
                "number. Put its body into `with accelerator.accumulate(model):`."
            )
        return is_boundary

    def _count_last_step(self) -> None:
        """Count the step after which the loop has ended, unless an error has ended it."""
        if self._has_trained and not self._run.session.status.phase.is_terminal:
            self.step += 1
            self._run.session.report(step=self.step, loss=self._run.read_loss(self._loss))

    def _end_step(self, epoch: int, epoch_step: int) -> None:
        self.step += 1
        notice: Notice | None = self._run.end_step(self.step, loss=self._run.read_loss(self._loss))
        if notice is None:
            return
        path = self._checkpoints.folder / f"step-{self.step}"
        self._run.begin_saving(self.step)
        self._accelerator.save_state(str(path))
        position = {"epoch": epoch, "epoch_step": epoch_step, "seed": self._order.seed, "ranks": self._world_size}
        version = accelerate.__version__
        record = CheckpointRecord(self.step, self._batch, self._model, "accelerate", version, position)
        self._checkpoints.complete(path, record)
        if self._accelerator.is_main_process:
            self._checkpoints.remove_old(self._run.session.checkpoint_keep)
        self._run.end_saving(self.step)
        if notice.requires_exit:
            self._run.leave()

    def _watch_loss(self) -> None:
        """Keep the loss of each forward pass, which the loop gives to the accelerator, and note the last of a step."""
        accelerator, backward = self._accelerator, self._accelerator.backward

        def keep_loss_and_go_backward(loss: torch.Tensor, **keywords: Any) -> None:
            self._loss = loss.detach()
            backward(loss, **keywords)
            self._has_trained = accelerator.sync_gradients

        accelerator.backward = keep_loss_and_go_backward

    def _divide_batch(self, loader: DataLoader[Any], record: CheckpointRecord | None, *, asked: int) -> None:
        accelerator = self._accelerator
        self._world_size, rank = accelerator.num_processes, accelerator.process_index
        sampler, micro_batch = find_sampler(loader), read_batch_size(loader)
        self._batch = choose_global_batch(
            asked,
            None if record is None else record.batch,
            rank_batch=micro_batch * accelerator.gradient_accumulation_steps,
            world_size=self._world_size,
        )
        division = divide_global_batch(
            self._batch.global_batch, world_size=self._world_size, micro_batch_max=micro_batch
        )
        accelerator.gradient_accumulation_steps = self._accumulate = division.accumulate
        seed = broadcast_object_list([torch.initial_seed() % 2**31])[0] if record is None else record.position["seed"]
        self._order = GlobalSampler(
            sampler, global_batch=self._batch.global_batch, seed=seed, drop_last=loader.drop_last
        )
        self._batches = RankBatchSampler(self._order, division, rank=rank, world_size=self._world_size)
        self._loader = PositionedLoader.replace(loader, self._batches)

    def _restore(self, path: Path, record: CheckpointRecord) -> None:
        accelerator = self._accelerator
        fresh = [(each.scheduler, each.scheduler.state_dict()) for each in accelerator._schedulers]
        accelerator.load_state(str(path))
        accelerator.step = 0  # it counts batches, of which a step may now have another number
        self._start_epoch, self._start_step = record.position["epoch"], record.position["epoch_step"]
        if record.position["ranks"] == self._world_size:
            return
        for prepared, (scheduler, state) in zip(accelerator._schedulers, fresh, strict=True):
            if prepared.step_with_optimizer and not prepared.split_batches:
                # Accelerate advances it once per rank and step, so its length follows the number of ranks.
                _advance_scheduler(scheduler, state, record.step * self._world_size)


def _advance_scheduler(scheduler: Any, state: dict[str, Any], count: int) -> None:
    """Set a scheduler to where it is after `count` steps from its initial state."""
    scheduler.load_state_dict(state)
    groups = scheduler.optimizer.param_groups
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch, scheduler._step_count = count, count + 1
        rates = [base * rate(count) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
        return
    for group, rate in zip(groups, state["_last_lr"], strict=True):
        group["lr"] = rate
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        for _ in range(count):
            scheduler.step()
