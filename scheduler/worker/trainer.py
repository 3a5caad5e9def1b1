"""Trainer: the reference training loop of a GPT on the shipped text, under whatever plan the session has."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.worker import checkpoint
from scheduler.worker.ledger import Ledger
from scheduler.worker.manifest import Position
from scheduler.worker.mesh import DataLayout, data_layout, data_plan, gradient_sync, parallelise
from scheduler.worker.model import build_gpt, model_size
from scheduler.worker.session import Session
from scheduler.worker.text import TextData, rank_samples

logger = logging.getLogger(__name__)

_DEFAULT_GLOBAL_BATCH = 12


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Zeros mean: `steps` the job's, `global_batch` the plan's, `checkpoint_every` only at the end."""

    model: str = "tiny-gpt"
    steps: int = 0
    global_batch: int = 0
    checkpoint_every: int = 0
    keep: int = 2
    seed: int = 0
    dtype: str = "float32"
    learning_rate: float = 1e-3
    step_delay_s: float = 0.0
    ledger_dir: Path | None = None


def train(session: Session, settings: TrainerSettings) -> None:
    """Trains to the last step, or to the step at which a notice says leave.

    Raises:
        ValueError: settings, plan or checkpoint do not fit each other; the message names what.
    """
    steps = settings.steps or session.steps_total
    if steps < 1:
        raise ValueError("steps is 0: give --steps or EBBTIDE_STEPS, at least 1")
    blocks = model_size(settings.model).layers
    # A plan that cannot be run is refused before the ranks wait for each other.
    layout = data_layout(_plan(session, settings), world_size=session.world_size, blocks=blocks)
    torch.set_num_threads(1)
    session.init_process_group()
    trainer = Trainer(session, settings, layout)
    trainer.resume()
    while trainer.position.step < steps:
        if notice := session.notice():
            trainer.save()
            if notice.leaves:
                session.leave()
                return
        trainer.one_step()
        if settings.checkpoint_every and trainer.position.step % settings.checkpoint_every == 0:
            trainer.save()
    trainer.save()
    session.succeed()


class Trainer:
    """Model, optimizer, data and position of one rank."""

    def __init__(self, session: Session, settings: TrainerSettings, layout: DataLayout) -> None:
        size = model_size(settings.model)
        dtype = _dtype(settings.dtype)
        self.position = Position(step=0, samples=0)
        self._session = session
        self._settings = settings
        self._layout = layout
        self._device = session.device
        self._root = session.checkpoint_dir
        self._data = TextData(sequence=size.sequence, seed=settings.seed)
        model = build_gpt(size, seed=settings.seed, dtype=dtype)
        self._model: nn.Module = parallelise(model, layout, device=self._device)
        # Blocks may be spread differently, which the combined (foreach) update does not take.
        self._optimizer = AdamW(
            self._model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, foreach=False
        )
        torch.manual_seed(settings.seed)
        self._ledger = Ledger(settings.ledger_dir, generation=session.generation, rank=session.rank)

    def resume(self) -> None:
        """Takes up the last complete checkpoint where there is one."""
        if self._root is not None:
            checkpoint.require_writable(self._root)
            found = checkpoint.find_latest(self._root)
            if found is not None:
                self.position = checkpoint.load(
                    self._root, found, self._model, self._optimizer, settings=self._identity()
                )
                self._record_state("loaded")
        self._session.resumed(self.position.step)

    def one_step(self) -> None:
        """Forward and backward over this rank's share, one update, and a report of the global batch's mean loss."""
        began_s = time.perf_counter()
        layout = self._layout
        shares = self._shares()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, samples in enumerate(shares):
            with gradient_sync(self._model, wanted=number == layout.micro_batches - 1):
                total += self._forward_backward(samples)
        self._optimizer.step()
        self._optimizer.zero_grad()
        dist.all_reduce(total)
        loss = total.item() / layout.replicas
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {self.position.step + 1} is {loss}; a lower --learning-rate may help")
        time.sleep(self._settings.step_delay_s)
        batch = layout.micro_batches * layout.micro_batch_size
        self.position = Position(self.position.step + 1, self.position.samples + batch)
        self._ledger.step(self.position.step, samples=(n for share in shares for n in share), loss=loss)
        self._session.report(step=self.position.step, loss=loss, samples_per_s=batch / (time.perf_counter() - began_s))

    def save(self) -> None:
        """Saves the present step, once. The start is not saved, and without a checkpoint directory nothing is."""
        if self._root is None or self.position.step == 0 or self._session.status.checkpoint_step == self.position.step:
            return
        with self._session.saving(self.position.step):
            checkpoint.save(
                self._root,
                self._model,
                self._optimizer,
                position=self.position,
                settings=self._identity(),
                keep=self._settings.keep,
            )
        self._record_state("saved")

    def _shares(self) -> list[list[int]]:
        return rank_samples(
            position=self.position.samples,
            micro_batch_size=self._layout.micro_batch_size,
            micro_batches=self._layout.micro_batches,
            rank=self._session.rank,
            replicas=self._layout.replicas,
        )

    def _forward_backward(self, samples: list[int]) -> torch.Tensor:
        """The mean loss over these samples, as its part of the step's mean."""
        inputs, targets = self._data.batch(samples)
        logits = self._model(inputs.to(self._device))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(self._device).flatten())
        part = loss / self._layout.micro_batches
        torch.autograd.backward(part)
        return part.detach().double()

    def _identity(self) -> dict[str, str | int | float]:
        """What must not change between generations, or the losses would not be those of one training."""
        chosen = self._settings
        return {
            "model": chosen.model,
            "dtype": chosen.dtype,
            "seed": chosen.seed,
            "learning_rate": chosen.learning_rate,
            "windows": self._data.windows,
            "global_batch": self._layout.micro_batches * self._layout.micro_batch_size,
        }

    def _record_state(self, event: str) -> None:
        if self._ledger.is_kept:
            entries = checkpoint.full_state(self._model, self._optimizer)
            self._ledger.state(self.position.step, event, entries=entries)


def _plan(session: Session, settings: TrainerSettings) -> ParallelPlan:
    """The session's plan, with the global batch that the settings ask for."""
    if session.plan is None:
        return data_plan(replicas=session.world_size, global_batch=settings.global_batch or _DEFAULT_GLOBAL_BATCH)
    plan, wanted = session.plan, settings.global_batch
    if wanted == 0:
        return plan
    if wanted % plan.micro_batches:
        raise ValueError(
            f"global batch is {wanted}, it must be a multiple of the plan's {plan.micro_batches} micro-batches"
        )
    return replace(plan, micro_batch_size=wanted // plan.micro_batches)


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "float64": torch.float64}
    if name not in known:
        raise ValueError(f"dtype is {name!r}, allowed are {', '.join(known)}")
    return known[name]
