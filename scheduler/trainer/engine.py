"""The training engine: model, optimizers and batches of one rank under one layout, and the step over them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from scheduler.trainer.dataset import BatchLoader
from scheduler.trainer.frozen_outputs import FrozenOutputCache, FrozenOutputStore
from scheduler.trainer.layout import Layout
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import get_model_size
from scheduler.trainer.model_parts import BuildOptions, build_model_parts
from scheduler.trainer.optimizer import build_optimizers
from scheduler.trainer.pipeline import build_forward_backward
from scheduler.trainer.settings import TrainerSettings, parse_dtype
from scheduler.trainer.training_state import TrainablePart
from scheduler.trainer.varied_lengths import VariedLengthBatches


class TrainingEngine:
    """Model, optimizers and batches of one rank. It knows steps and samples, but no session and no checkpoint.

    Attributes:
        parts: the model parts of this rank with their optimizers; empty until `build`.
        frozen_outputs: the cache of frozen blocks' outputs, if blocks are frozen and a store was given.
    """

    def __init__(
        self, settings: TrainerSettings, layout: Layout, *, rank: int, device: str, lengths: tuple[int, ...] = ()
    ) -> None:
        """Make the process groups. Collective over all ranks."""
        self._settings = settings
        self._layout = layout
        self._rank = rank
        self._device = device
        self._meshes = build_meshes(layout, device=device)
        size = get_model_size(settings.model)
        self.batches = BatchLoader(layout, size=size, rank=rank, seed=settings.seed, device=device)
        self.varied = VariedLengthBatches(lengths, layout, size=size, seed=settings.seed) if lengths else None
        self.parts: tuple[TrainablePart, ...] = ()
        self.frozen_outputs: FrozenOutputCache | None = None

    def build(
        self, *, frozen_blocks: int = 0, for_loading: bool = False, frozen_store: FrozenOutputStore | None = None
    ) -> None:
        """Build the model parts and optimizers, with initial weights unless they are loaded afterwards. Collective."""
        settings = self._settings
        options = BuildOptions(
            size=get_model_size(settings.model),
            rank=self._rank,
            device=self._device,
            seed=settings.seed,
            dtype=parse_dtype(settings.dtype),
            frozen_blocks=frozen_blocks,
            for_loading=for_loading,
        )
        parts = build_model_parts(self._layout, self._meshes, options)
        self.parts = tuple(
            TrainablePart(
                part.module,
                build_optimizers(part, self._layout, learning_rate=settings.learning_rate, for_loading=for_loading),
            )
            for part in parts
        )
        self._first_model = parts[0].model
        self._forward_backward = build_forward_backward(self._layout, self._meshes, parts, options)
        if frozen_store is not None and frozen_blocks:
            cache = FrozenOutputCache(frozen_store, self._layout, options, self.batches.find_window)
            for part in parts:
                part.model.output_cache = cache.connect(part.model.layer_range)
            self.frozen_outputs = cache

    def run_step(self, first_sample: int, *, learning_rate: float) -> float:
        """Run forward, backward and one optimizer step on the batch that begins with `first_sample`. Collective.

        Returns:
            The mean loss of the global batch.
        """
        share = self._run_batch(first_sample)
        self._step_optimizers(learning_rate)
        return self._reduce_loss(share)

    def set_learning_rate(self, rate: float) -> None:
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _run_batch(self, first_sample: int) -> torch.Tensor:
        """Run forward and backward passes, and return this rank's share of the loss."""
        if self.varied is not None:
            return self.varied.run(self._first_model, first_sample)
        return self._forward_backward(*self.batches.load_batch(first_sample))

    def _step_optimizers(self, learning_rate: float) -> None:
        self.set_learning_rate(learning_rate)
        for optimizer in self._optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def _optimizers(self) -> list[Optimizer]:
        return [optimizer for part in self.parts for optimizer in part.optimizers]

    def _reduce_loss(self, share: torch.Tensor) -> float:
        """Return the mean over the global batch from each rank's share. Collective."""
        total = share if self.batches.counts_loss else torch.zeros_like(share)
        dist.all_reduce(total)
        return total.item()
