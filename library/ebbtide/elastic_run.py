"""`ebbtide.elastic`: a plain PyTorch training loop that takes part in resizes.

    with ebbtide.elastic(model, optimizer, scheduler, dataloader) as run:
        for epoch in run.epochs(10):
            for batch in run:
                ...

After each step, the run acts on notices: it saves model, optimizer, scheduler, position and random state as a standard
checkpoint of torch.distributed.checkpoint, and ends the process if it has to. At the next start it restores all of
them, on any number of ranks, and continues with the next batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ebbtide.checkpoints import load_newest_checkpoint, save_checkpoint
from ebbtide.global_batches import BatchSource, find_sampler
from ebbtide.random_state import mix_seed
from ebbtide.reproducible_draws import PositionedSampler
from ebbtide.session import Session
from ebbtide.training_state import ModelState, OptimizerState, Position, PositionState

Draw = TypeVar("Draw", bound=Callable[..., Any])

_KEEP = 2
_LOSS_PERIOD_S = 1.0
_RESERVED = ("model", "optimizer", "scheduler", "scaler", "position")


def elastic(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Any = None,
    dataloader: DataLoader[Any] | None = None,
    *,
    scaler: Any = None,
    epochs: int = 1,
    global_batch: int = 0,
    accumulate: int = 1,
    folder: str | Path | None = None,
    keep: int = 0,
    **objects: Any,
) -> ElasticRun:
    """Return the run of a training loop, which begins when its `with` block does.

    Without Ebbtide's environment the loop runs alone or under torchrun. It then saves only if `folder` is given.

    Args:
        model: the model as the loop calls it: plain, or wrapped by DistributedDataParallel, FSDP2 or torch.compile.
        scheduler: learning-rate scheduler, or any object with `state_dict` and `load_state_dict`.
        dataloader: loader of a map-style dataset with a `batch_size`. Its batches are divided anew in each generation.
        scaler: gradient scaler.
        epochs: passes of `for batch in run` over the data, where `run.epochs` is not used.
        global_batch: samples per batch on all ranks together. Default: `batch_size` times the ranks of the first start.
        accumulate: batches whose gradients are accumulated in one step of the optimizer.
        folder: directory of the checkpoints. Default: the job's, `EBBTIDE_CHECKPOINT_DIR`.
        keep: number of checkpoints to keep. Default: the job's, else 2.
        objects: further objects with `state_dict` and `load_state_dict`, such as `ema=ema_model`.

    Raises:
        ValueError: an argument cannot be used; the message names it.
    """
    if dataloader is not None:
        find_sampler(dataloader)
    for name, value in (("epochs", epochs), ("accumulate", accumulate)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}. Use 1 or more.")
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    state: dict[str, Any] = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizers)}
    for name, entry in {"scheduler": scheduler, "scaler": scaler, **objects}.items():
        if name in objects and name in _RESERVED:
            raise ValueError(f"`{name}` names a part of the checkpoint already. Use another keyword.")
        if entry is not None:
            state[name] = _check_stateful(name, entry)
    session = Session.from_environment()
    try:
        place = Path(folder) if folder is not None else session.checkpoint_dir
        _check_process_group(session)
    except ValueError:
        session.__exit__(*sys.exc_info())
        raise
    run = ElasticRun(session, model, state, folder=place, keep=keep or session.checkpoint_keep or _KEEP)
    run.plan_batches(dataloader, epochs=epochs, global_batch=global_batch, accumulate=accumulate)
    return run


class ElasticRun:
    """A training loop under way. `ebbtide.elastic` creates it.

    Attributes:
        session: the session of this rank.
    """

    def __init__(
        self, session: Session, model: nn.Module, state: dict[str, Any], *, folder: Path | None, keep: int
    ) -> None:
        self.session = session
        self._model = model
        self._position = Position()
        self._position_state = PositionState(self._position)
        self._state = {**state, "position": self._position_state}
        self._folder, self._keep = folder, keep
        self._loader: DataLoader[Any] | None = None
        self._epochs = self._accumulate = 1
        self._global_batch = 0
        self._source: BatchSource | None = None
        self._sampler: PositionedSampler | None = None
        self._is_in_epoch = False
        self._saved_step = 0
        self._loss: float | torch.Tensor | None = None
        self._loss_read_at_s = float("-inf")
        self._samples_per_s: float | None = None

    def plan_batches(self, loader: DataLoader[Any] | None, *, epochs: int, global_batch: int, accumulate: int) -> None:
        """Set the loader and how its batches make steps. Call it before the run begins."""
        self._loader, self._epochs, self._global_batch = loader, epochs, global_batch
        self._accumulate = accumulate

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._position.step

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._position.epoch

    @property
    def sampler(self) -> Any:
        """The sampler of the user's loader, so that the run can stand in for the loader."""
        return None if self._loader is None else self._loader.sampler

    def __len__(self) -> int:
        """Return the number of batches that are left in the present epoch."""
        source, position = self._source, self._position
        return 0 if source is None else source.count_batches(position.samples)

    def __enter__(self) -> ElasticRun:
        """Restore the newest checkpoint, if there is one.

        Raises:
            CheckpointError: the checkpoints cannot be read, or belong to another training.
        """
        try:
            self._restore()
        except BaseException:
            self.session.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Save the final state and report success, unless an error ends the block or the ranks leave."""
        try:
            if error is None:
                if self._folder is not None and self._saved_step != self.step:
                    self.save()
                self.session.succeed()
        except BaseException:
            self.session.__exit__(*sys.exc_info())
            raise
        self.session.__exit__(kind, error, traceback)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of `total`. Iterate over the run in each of them."""
        while self._position.epoch < total:
            epoch, self._is_in_epoch = self._position.epoch, True
            yield epoch
            self._is_in_epoch = False
            if self._position.epoch == epoch:
                # The loop has ended the epoch early, or used no batch of it.
                self._position.epoch, self._position.samples = epoch + 1, 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank that are left: of the present epoch in a loop over `epochs`, else of all.

        Raises:
            ValueError: there is no dataloader.
        """
        if self._source is None:
            raise ValueError("The run has no `dataloader`. Pass one to ebbtide.elastic(), or loop over `run.steps()`.")
        last = self._position.epoch + 1 if self._is_in_epoch else self._epochs
        while self._position.epoch < last:
            yield from self._iterate_epoch(self._source)

    def steps(self, total: int = 0) -> Iterator[int]:
        """Yield the number of completed steps before each step that is left of `total`.

        For loops that draw their data themselves.

        Args:
            total: steps of the whole training. Default: `steps` of the job, else no end.
        """
        last = total or self.session.steps_total
        if self._sampler is not None:
            self._sampler.begin_steps()
        for step in range(self.step, last) if last else count(self.step):
            if self._sampler is not None:
                self._sampler.begin_step(step)
            yield step
            self._finish_step()

    def reproducible(self, draw: Draw) -> Draw:
        """Return a function that draws training data like `draw`, but the same data on any number of ranks.

        `draw` uses the random numbers of torch, Python or NumPy. Each call of it on some rank is one of equally many
        batches of a step, so that ranks together draw the same batches after a resize. In evaluation mode of the model,
        calls do not count as training data. The loop is over `steps`.

        Raises:
            ValueError: the run has such a function already.
        """
        if self._sampler is not None:
            raise ValueError("The run has one function for training data already. Call run.reproducible() once.")
        session, position = self.session, self._position
        sampler = PositionedSampler(draw, seed=position.seed, rank=session.rank, world_size=session.world_size)
        sampler.resume(position.draws)
        self._sampler = sampler

        def draw_reproducibly(*arguments: Any, **keywords: Any) -> Any:
            return sampler.draw(*arguments, is_training=self._model.training, **keywords)

        return draw_reproducibly  # type: ignore[return-value]

    def report(self, *, loss: float | torch.Tensor | None = None, samples_per_s: float | None = None) -> None:
        """Report figures of the present step. Optional; a tensor is read from its GPU once per second at most."""
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._samples_per_s = samples_per_s

    def save(self) -> None:
        """Save a checkpoint of the completed steps now. Collective: every rank must call it.

        Raises:
            ValueError: there is no directory for checkpoints.
            CheckpointError: it cannot be written.
        """
        if self._folder is None:
            raise ValueError("There is no directory for checkpoints. Pass `folder` to ebbtide.elastic().")
        with self.session.saving(self.step):
            self._position_state.collect()
            save_checkpoint(self._state, self._folder, step=self.step, keep=self._keep)
        self._saved_step = self.step

    def _restore(self) -> None:
        position, session = self._position, self.session
        session.mark_started()
        position.seed = _agree_on_seed()
        step = None if self._folder is None else load_newest_checkpoint(self._state, self._folder)
        if self._loader is not None:
            first = position.global_batch or (self._loader.batch_size or 1) * session.world_size
            position.global_batch = self._global_batch or first
            self._source = BatchSource(
                self._loader,
                global_batch=position.global_batch,
                rank=session.rank,
                world_size=session.world_size,
                seed=position.seed,
            )
        if step is not None:
            fresh_seed = mix_seed(position.seed, step, session.rank)
            self._position_state.restore_random_state(session.rank, fresh_seed)
        self._saved_step = position.step
        session.mark_resumed(position.step)

    def _iterate_epoch(self, source: BatchSource) -> Iterator[Any]:
        epoch, start = self._position.epoch, self._position.samples
        for number, (batch, samples) in enumerate(source.iterate(epoch, start), start=1):
            yield batch
            if number % self._accumulate == 0:
                self._finish_step(samples=samples)
        self._position.epoch, self._position.samples = epoch + 1, 0

    def _finish_step(self, *, samples: int = 0) -> None:
        """Count a step, report it, and act on a notice."""
        position = self._position
        position.step += 1
        position.samples = samples
        if self._sampler is not None:
            position.draws = self._sampler.position
        self.session.report(step=position.step, loss=self._read_loss(), samples_per_s=self._samples_per_s)
        notice = self.session.poll_notice()
        if notice is None:
            return
        self.save()
        if notice.requires_exit:
            self.session.leave()
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()
            raise SystemExit(0)

    def _read_loss(self) -> float | None:
        """Return the loss as a number. Reading a tensor waits for the GPU, so it is done once per second at most."""
        if not isinstance(self._loss, torch.Tensor):
            return self._loss
        now_s = time.monotonic()
        if now_s - self._loss_read_at_s < _LOSS_PERIOD_S:
            return self.session.status.loss
        self._loss_read_at_s = now_s
        return float(self._loss)


def _check_stateful(name: str, entry: Any) -> Any:
    if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
        raise ValueError(
            f"`{name}` is a {type(entry).__name__}, which cannot be saved. "
            "Pass an object with `state_dict` and `load_state_dict`."
        )
    return entry


def _check_process_group(session: Session) -> None:
    if session.world_size == 1:
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"`WORLD_SIZE` is {session.world_size}, but there is no process group. "
            "Call torch.distributed.init_process_group() and wrap the model before ebbtide.elastic()."
        )


def _agree_on_seed() -> int:
    """Return rank 0's initial seed of torch on all ranks."""
    seed = [torch.initial_seed()]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(seed)
    return seed[0]
