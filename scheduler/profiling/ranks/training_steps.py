"""Steps of the reference trainer's model under a plan: their times and peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.profiling.ranks.device import Device
from scheduler.profiling.tasks import GptShape, StepTask
from scheduler.trainer.dataset import BatchLoader, NumberedSamples
from scheduler.trainer.layout import Layout, build_layout
from scheduler.trainer.local_shards import get_local_tensor
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import GptSize
from scheduler.trainer.model_parts import BuildOptions, ModelPart, build_model_parts
from scheduler.trainer.optimizer import build_optimizers
from scheduler.trainer.pipeline import ForwardBackward, build_forward_backward

_WARMUP_STEPS, _STEPS, _LONG_STEPS = 2, 5, 3
_LEARNING_RATE = 1e-5
_LONG_STEP_S = 0.3
"""Longer steps are repeated less often."""


class _RandomTokens:
    """Two windows of random tokens."""

    def __init__(self, shape: GptShape) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(shape.vocabulary, (2, shape.sequence + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self._tokens[index]


class TrainingStep:
    """One step of a model under a plan, in parts that can be timed."""

    def __init__(self, shape: GptShape, plan: ParallelPlan, device: Device) -> None:
        """Build model, optimizer and batch. Collective over all ranks."""
        size = GptSize(shape.layers, shape.hidden, shape.heads, shape.vocabulary, shape.sequence)
        layout = build_layout(plan, world_size=dist.get_world_size(), block_count=shape.layers)
        compute_dtype = None if device.compute_dtype is torch.float32 else device.compute_dtype
        options = BuildOptions(size, dist.get_rank(), device.torch_name, compute_dtype=compute_dtype, for_loading=True)
        meshes = build_meshes(layout, device=device.torch_name)
        parts = build_model_parts(layout, meshes, options)
        _fill_weights(parts)
        self._optimizers = [
            optimizer
            for part in parts
            for optimizer in build_optimizers(part, layout, learning_rate=_LEARNING_RATE, for_loading=True)
        ]
        self._run: ForwardBackward = build_forward_backward(layout, meshes, parts, options)
        self._batch = _load_batch(shape, size, layout, device)

    def run_passes(self) -> Tensor:
        """Run forward and backward passes of all micro-batches, and return this rank's share of the loss."""
        return self._run(*self._batch)

    def evaluate(self) -> Tensor:
        """Run forward passes alone."""
        with torch.no_grad():
            return self._run.evaluate(*self._batch)

    def update(self) -> None:
        """Run the optimizer and drop the gradients."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def run_step(self) -> float:
        """Run a whole step as the trainer does, including the sum of the loss over ranks."""
        loss = self.run_passes()
        self.update()
        dist.all_reduce(loss)
        return loss.item()


def measure_step(task: StepTask, device: Device) -> dict[str, float]:
    """Return the time of a whole step, of its parts, and the peak memory of the fullest rank. Collective."""
    device.reset_peak()
    step = TrainingStep(task.shape, task.plan, device)
    for _ in range(_WARMUP_STEPS):
        warm_s = _time_once(step.run_step, device)
    repetitions, parts = (_STEPS, 2) if warm_s < _LONG_STEP_S else (_LONG_STEPS, 1)
    times_s = sorted(_time_once(step.run_step, device) for _ in range(repetitions))
    peaks = device.measure_peaks()
    optimizer_s = []
    for _ in range(parts):
        step.run_passes()
        optimizer_s.append(_time_once(step.update, device))
    forward_s = [_time_once(step.evaluate, device) for _ in range(parts)]
    middle_s = median(times_s)
    figures = {
        "step_s": middle_s,
        "spread": (times_s[-1] - times_s[0]) / middle_s,
        "optimizer_s": min(optimizer_s),
        "forward_s": min(forward_s),
    }
    return figures | {name: _maximum(value, device) for name, value in peaks.items()}


def _load_batch(shape: GptShape, size: GptSize, layout: Layout, device: Device) -> tuple[Tensor, Tensor]:
    data = NumberedSamples(_RandomTokens(shape), seed=0)
    loader = BatchLoader(layout, size=size, rank=dist.get_rank(), data=data, device=device.torch_name)
    return loader.load_batch(0)


@torch.no_grad()
def _fill_weights(parts: tuple[ModelPart, ...]) -> None:
    """Draw weights on the device. The trainer's own values are the same in every layout, and take long to draw."""
    for part in parts:
        for parameter in part.model.parameters():
            local = get_local_tensor(parameter)
            local.normal_(std=0.02) if local.dim() > 1 else local.fill_(1.0)


def _time_once(call: Callable[[], object], device: Device) -> float:
    """Return the slowest rank's time of one call, which all ranks start together."""
    device.synchronize()
    dist.barrier()
    started_s = time.perf_counter()
    call()
    device.synchronize()
    return _maximum(time.perf_counter() - started_s, device)


def _maximum(value: float, device: Device) -> float:
    largest = torch.tensor([value], dtype=torch.float32, device=device.torch_name)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
