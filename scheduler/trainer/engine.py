"""The training engine: model, optimizers and batches of one rank under one layout, and the step over them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from scheduler.trainer.dataset import BatchLoader
from scheduler.trainer.dropout import MicroBatchTokens
from scheduler.trainer.frozen_outputs import FrozenOutputCache, FrozenOutputStore
from scheduler.trainer.gradients import GlobalGradients, compute_clip_factor
from scheduler.trainer.layout import Layout
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import get_model_size
from scheduler.trainer.model_parts import BuildOptions, ModelPart, build_model_parts
from scheduler.trainer.optimizer import build_optimizers
from scheduler.trainer.pipeline import build_forward_backward
from scheduler.trainer.precision import LossScaler
from scheduler.trainer.settings import Autocast, TrainerSettings, parse_dtype
from scheduler.trainer.training_state import TrainablePart
from scheduler.trainer.user_code import load_samples
from scheduler.trainer.varied_lengths import VariedLengthBatches


class TrainingEngine:
    """Model, optimizers and batches of one rank. It knows steps and samples, but no session and no checkpoint.

    Attributes:
        parts: the model parts of this rank with their optimizers; empty until `build`.
        frozen_outputs: the cache of frozen blocks' outputs, if blocks are frozen and a store was given.
        loss_scaler: the scale of the loss, in use with float16 alone.
    """

    def __init__(
        self, settings: TrainerSettings, layout: Layout, *, rank: int, device: str, lengths: tuple[int, ...] = ()
    ) -> None:
        """Make the process groups. Collective over all ranks.

        Raises:
            ValueError: a dataset cannot be built.
        """
        self._settings = settings
        self._layout = layout
        self._rank = rank
        self._device = device
        size, seed = get_model_size(settings.model), settings.seed
        data = load_samples("--dataset", settings.dataset, size=size, seed=seed)
        self.batches = BatchLoader(layout, size=size, rank=rank, data=data, device=device)
        self._evaluation_batches = self.batches
        if settings.evaluation_dataset:
            data = load_samples("--evaluation-dataset", settings.evaluation_dataset, size=size, seed=seed)
            self._evaluation_batches = BatchLoader(layout, size=size, rank=rank, data=data, device=device)
        self._meshes = build_meshes(layout, device=device)
        self.varied = VariedLengthBatches(lengths, layout, size=size, data=data) if lengths else None
        self.loss_scaler = LossScaler(enabled=settings.autocast is Autocast.FP16, device=device)
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
            compute_dtype=settings.autocast.dtype,
            dropout=settings.dropout,
            compile_backend=settings.compile_backend,
            frozen_blocks=frozen_blocks,
            for_loading=for_loading,
        )
        self._model_parts = build_model_parts(self._layout, self._meshes, options)
        self.parts = tuple(self._build_trainable_part(part, for_loading=for_loading) for part in self._model_parts)
        self._gradients = GlobalGradients(self._model_parts, self._layout, rank=self._rank)
        self._forward_backward = build_forward_backward(
            self._layout, self._meshes, self._model_parts, options, loss_scale=self.loss_scaler.scale
        )
        if frozen_store is not None and frozen_blocks:
            cache = FrozenOutputCache(frozen_store, self._layout, options, self.batches.find_window)
            for part in self._model_parts:
                part.model.output_cache = cache.connect(part.model.layer_range)
            self.frozen_outputs = cache

    def run_step(
        self, first_sample: int, *, learning_rate: float, before_update: Callable[[], None] = lambda: None
    ) -> float:
        """Run forward, backward and one optimizer step on the batch that begins with `first_sample`. Collective.

        A step whose float16 gradients overflow changes no weight.

        Args:
            before_update: called when the passes have run and the state is about to change.

        Returns:
            The mean loss of the global batch.
        """
        share = self._run_batch(first_sample)
        # The scale that the loss was computed with, before the step changes it.
        loss = share / self.loss_scaler.scale
        before_update()
        if self._prepare_gradients():
            self.set_learning_rate(learning_rate)
            for optimizer in self._optimizers():
                optimizer.step()
        for optimizer in self._optimizers():
            optimizer.zero_grad()
        return self._reduce_loss(loss)

    def set_learning_rate(self, rate: float) -> None:
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["lr"] = rate

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the first batches of the evaluation data, without dropout. Collective."""
        models = [part.model for part in self._model_parts]
        for model in models:
            model.eval()
        share = torch.zeros((), dtype=torch.float64, device=self._device)
        for number in range(self._settings.evaluation_batches):
            batch = self._evaluation_batches.load_batch(number * self._layout.global_batch)
            share += self._forward_backward.evaluate(*batch)
        for model in models:
            model.train()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # Weights that a backward pass would have released.
                    module.reshard()
        return self._reduce_loss(share / self.loss_scaler.scale / self._settings.evaluation_batches)

    def _build_trainable_part(self, part: ModelPart, *, for_loading: bool) -> TrainablePart:
        settings = self._settings
        optimizers = build_optimizers(
            part,
            self._layout,
            learning_rate=settings.learning_rate,
            name=settings.optimizer,
            for_loading=for_loading,
        )
        return TrainablePart(part.module, optimizers, self.loss_scaler.state)

    def _run_batch(self, first_sample: int) -> Tensor:
        """Run forward and backward passes, and return this rank's share of the scaled loss."""
        if self.varied is not None:
            return self.varied.run(self._model_parts[0].model, first_sample, loss_scale=self.loss_scaler.scale)
        for part in self._model_parts:
            if isinstance(part.model.token_numbers, MicroBatchTokens):
                part.model.token_numbers.begin_step(first_sample)
        return self._forward_backward(*self.batches.load_batch(first_sample))

    @torch.no_grad()
    def _prepare_gradients(self) -> bool:
        """Remove the loss scale and clip. Return whether the gradients are finite. Collective."""
        clip_norm, scaler = self._settings.clip_norm, self.loss_scaler
        if not clip_norm and not scaler.is_enabled:
            return True
        norm = self._gradients.compute_norm() / scaler.scale
        if scaler.is_enabled:
            overflowed = not math.isfinite(norm.item())
            factor = 1.0 / scaler.scale.double()
            scaler.update(overflowed=overflowed)
            if overflowed:
                return False
        else:
            factor = torch.ones_like(norm)
        self._gradients.multiply(factor * compute_clip_factor(norm, clip_norm) if clip_norm else factor)
        return True

    def _optimizers(self) -> list[Optimizer]:
        return [optimizer for part in self.parts for optimizer in part.optimizers]

    def _reduce_loss(self, share: Tensor) -> float:
        """Return the mean over the global batch from each rank's share. Collective."""
        total = share if self.batches.counts_loss else torch.zeros_like(share)
        dist.all_reduce(total)
        return total.item()
