"""`ebbtide.elastic`: a plain PyTorch training loop that takes part in resizes.

    with ebbtide.elastic(model, optimizer, scheduler, dataloader) as run:
        for epoch in run.epochs(10):
            for batch in run:
                ...

Flat scripts need no block:

    run = ebbtide.elastic(model, optimizer)
    for step in run.steps(1000):
        ...
    run.finish()

After each step, the run acts on notices: it saves model, optimizer, scheduler, position and random state as a standard
checkpoint of torch.distributed.checkpoint, and ends the process if it has to. At the next start it restores all of
them, on any number of ranks, and continues with the next batch.
"""

from __future__ import annotations

import logging
import sys
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
from ebbtide.loss_reader import LossReader
from ebbtide.process_end import ProcessEnd
from ebbtide.random_state import mix_seed
from ebbtide.reproducible_draws import PositionedSampler, list_wrapped_modules
from ebbtide.session import Session
from ebbtide.training_state import ModelState, ObjectState, OptimizerState, Position, PositionState

logger = logging.getLogger(__name__)

Draw = TypeVar("Draw", bound=Callable[..., Any])

_KEEP = 2
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
    """Restore the newest checkpoint, if there is one, and return the run of a training loop.

    Use it as a `with` block, or call `run.finish()` after the loop. Without Ebbtide's environment the loop runs alone
    or under torchrun. It then saves only if `folder` is given.

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
        CheckpointError: the checkpoints cannot be read, or belong to another training.
    """
    if dataloader is not None:
        find_sampler(dataloader)
    for name, value in (("epochs", epochs), ("accumulate", accumulate)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}. Use 1 or more.")
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    _check_parameters(model, optimizers)
    state: dict[str, Any] = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizers)}
    for name, entry in {"scheduler": scheduler, "scaler": scaler, **objects}.items():
        if name in objects and name in _RESERVED:
            raise ValueError(f"`{name}` names a part of the checkpoint already. Use another keyword.")
        if entry is not None:
            state[name] = ObjectState(_check_stateful(name, entry))
    session = Session.from_environment()
    try:
        place = Path(folder) if folder is not None else session.checkpoint_dir
        _check_process_group(session)
        run = ElasticRun(session, model, state, folder=place, keep=keep or session.checkpoint_keep or _KEEP)
        run.plan_batches(dataloader, epochs=epochs, global_batch=global_batch, accumulate=accumulate)
        run.restore()
    except BaseException:
        session.__exit__(*sys.exc_info())
        raise
    run.watch(optimizers)
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
        self._has_passed = False  # all batches of the epoch, or of the training, were yielded in this process
        self._is_in_epoch = False
        self._has_stepped = False  # an optimizer has stepped since the last step was counted
        self._samples_after = 0  # position in the epoch once the present step is counted
        self._is_block = self._is_complete = False
        self._end: ProcessEnd | None = None
        self._saved_step = 0
        self._loss: float | torch.Tensor | None = None
        self._loss_reader = LossReader()
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
        """Return the run. When the block ends without an error, the run is finished."""
        self._is_block = True
        self._close_end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Save the final state and report success, unless an error ends the block or the ranks leave."""
        if error is not None:
            self.session.__exit__(kind, error, traceback)
            return
        try:
            self.finish()
        except BaseException:
            self.session.__exit__(*sys.exc_info())
            raise

    def finish(self) -> None:
        """Save the final state and report success. Collective: every rank must call it.

        A `with` block implies it. Without a block, call it after the loop, before the process group is destroyed. A
        loop that ends with `break` may have made a step that is not counted yet; this counts it.

        Raises:
            CheckpointError: the final state cannot be written.
        """
        if self.session.status.phase.is_terminal:
            return
        self._complete()
        self._close_end()
        self._succeed()

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of `total`. Iterate over the run in each of them."""
        position = self._position
        while position.epoch < total:
            epoch, self._is_in_epoch, self._has_passed = position.epoch, True, False
            yield epoch
            self._is_in_epoch = False
            if position.epoch == epoch:
                # The loop has ended the epoch early, or used no batch of it.
                position.epoch, position.samples, self._samples_after = epoch + 1, 0, 0
                if self._has_stepped:
                    self._finish_step()
        self._end_loop()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank that are left: of the present epoch in a loop over `epochs`, else of all.

        Raises:
            ValueError: there is no dataloader, or its batches were used up in this process.
        """
        if self._source is None:
            raise ValueError("The run has no `dataloader`. Pass one to ebbtide.elastic(), or loop over `run.steps()`.")
        if self._has_passed:
            raise ValueError(
                f"`for batch in run` has no batches left: the training has {self._position.epoch} epochs behind it. "
                "Use `for epoch in run.epochs(N)` around it for N epochs, or ebbtide.elastic(..., epochs=N)."
            )
        last = self._position.epoch + 1 if self._is_in_epoch else self._epochs
        while self._position.epoch < last:
            yield from self._iterate_epoch(self._source)
        self._has_passed = True
        if not self._is_in_epoch:
            self._end_loop()

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
        self._end_loop()

    def reproducible(self, draw: Draw) -> Draw:
        """Return a function that draws training data like `draw`, but the same data on any number of ranks.

        `draw` uses the global random numbers of torch, Python or NumPy, and is wrapped before it is first called. Each
        call of it on some rank is one of equally many batches of a step, so that ranks together draw the same batches
        after a resize. In evaluation mode of the model, calls do not count as training data. The loop is over `steps`.

        Raises:
            ValueError: the run has such a function already. The returned function raises it if its first call has used
                no such random number.
        """
        if self._sampler is not None:
            raise ValueError("The run has one function for training data already. Call run.reproducible() once.")
        session, position = self.session, self._position
        sampler = PositionedSampler(draw, seed=position.seed, rank=session.rank, world_size=session.world_size)
        sampler.resume(position.draws)
        self._sampler = sampler
        modules = list_wrapped_modules(self._model)

        def draw_reproducibly(*arguments: Any, **keywords: Any) -> Any:
            return sampler.draw(*arguments, is_training=all(module.training for module in modules), **keywords)

        return draw_reproducibly  # type: ignore[return-value]

    def report(self, *, loss: float | torch.Tensor | None = None, samples_per_s: float | None = None) -> None:
        """Report figures of the present step. Optional; a tensor is copied from its GPU once per second at most."""
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
            has_stepped = self._has_stepped
            save_checkpoint(self._state, self._folder, step=self.step, keep=self._keep)
            self._has_stepped = has_stepped  # torch steps an optimizer without state to read it
        self._saved_step = self.step

    def restore(self) -> None:
        """Restore the newest checkpoint, if there is one. `ebbtide.elastic` calls it."""
        position, session = self._position, self.session
        session.mark_started()
        position.seed = _agree_on_seed()
        step = None
        if self._folder is not None:
            session.record_nonfinite_losses_in(self._folder)
            step = load_newest_checkpoint(self._state, self._folder)
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
        self._saved_step, self._samples_after = position.step, position.samples
        session.mark_resumed(position.step)

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Note steps of the optimizers and the end of the process. `ebbtide.elastic` calls it."""
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_optimizer_step)
        self._end = ProcessEnd(on_error=self._report_error, on_exit=self._report_exit)

    def _note_optimizer_step(self, *_: Any) -> None:
        self._has_stepped = True

    def _report_error(self, error: BaseException) -> None:
        if not self.session.status.phase.is_terminal:
            self.session.__exit__(type(error), error, error.__traceback__)

    def _report_exit(self) -> None:
        """Report how a loop without a `with` block has ended, when the process ends."""
        if self.session.status.phase.is_terminal:
            self.session.__exit__(None, None, None)
        elif self._is_complete:
            self._succeed()
        else:
            error = RuntimeError(
                f"The script ended after step {self.step} without run.finish(). Call it after the loop, before the "
                "process group is destroyed."
            )
            logger.error("%s", error)
            self._report_error(error)

    def _succeed(self) -> None:
        self.session.succeed()
        self.session.__exit__(None, None, None)

    def _close_end(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def _end_loop(self) -> None:
        """Save the final state where no `with` block will. The process group may be gone when the process ends."""
        if not self._is_block:
            self._complete()

    def _complete(self) -> None:
        if self._has_stepped:
            self._count_step()
        if self._folder is not None and self._saved_step != self.step:
            self.save()
        self._is_complete = True

    def _iterate_epoch(self, source: BatchSource) -> Iterator[Any]:
        epoch, start = self._position.epoch, self._position.samples
        for number, (batch, samples) in enumerate(source.iterate(epoch, start), start=1):
            self._samples_after = samples
            yield batch
            if number % self._accumulate == 0:
                self._finish_step()
        self._position.epoch, self._position.samples, self._samples_after = epoch + 1, 0, 0

    def _finish_step(self) -> None:
        """Count a step, report it, and act on a notice."""
        self._count_step()
        notice = self.session.poll_notice()
        if notice is None:
            return
        self.save()
        if notice.requires_exit:
            self.session.leave()
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()
            raise SystemExit(0)

    def _count_step(self) -> None:
        position = self._position
        position.step += 1
        position.samples = self._samples_after
        if self._sampler is not None:
            position.draws = self._sampler.position
        self._has_stepped = False
        self.session.report(step=position.step, loss=self._read_loss(), samples_per_s=self._samples_per_s)

    def _read_loss(self) -> float | None:
        """Return the loss as a number: of a tensor on a GPU, that of an earlier step."""
        if not isinstance(self._loss, torch.Tensor):
            return self._loss
        value = self._loss_reader.read(self._loss)
        return self.session.status.loss if value is None else value


def _check_stateful(name: str, entry: Any) -> Any:
    if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
        raise ValueError(
            f"`{name}` is a {type(entry).__name__}, which cannot be saved. "
            "Pass an object with `state_dict` and `load_state_dict`."
        )
    return entry


def _check_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that the optimizers have parameters of the model only: their state is saved under the model's names."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if other := [parameter for parameter in parameters if id(parameter) not in own]:
            raise ValueError(
                f"`optimizer` has {len(other)} of {len(parameters)} parameters that `model` lacks, the first of shape "
                f"{tuple(other[0].shape)}. Pass a `model` that holds all modules which are trained, such as "
                "torch.nn.ModuleList([model, criterion])."
            )


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
