"""Forward and backward of one step: micro-batch by micro-batch, or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn import functional

from scheduler.domain.parallel_plan import ScheduleName
from scheduler.worker.layout import Layout
from scheduler.worker.mesh import Meshes
from scheduler.worker.parallel import Build, Part, gradient_sync, spreads_of

Loss = Callable[[Tensor, Tensor], Tensor]


class ForwardBackward(Protocol):
    """Leaves gradients in the parameters, summed over all ranks that share them."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Both of shape (micro-batches x samples, tokens): what this rank's first and last layers work on.

        Returns this rank's share of the global batch's mean loss, zero where its part has no head.
        """


def forward_backward(layout: Layout, meshes: Meshes, parts: Sequence[Part], build: Build) -> ForwardBackward:
    loss = share_of_loss(layout, tokens=build.size.sequence)
    if layout.groups == 1 and len(parts) == 1:
        return Accumulation(parts[0], layout.micro_batches, loss)
    return Pipeline(layout, meshes, parts, build, loss)


def share_of_loss(layout: Layout, *, tokens: int) -> Loss:
    """Cross-entropy over some cells as their share of the mean over all cells of a step."""
    cells = layout.global_batch * tokens

    def share(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / cells

    return share


class Accumulation:
    """One micro-batch after the other through all layers."""

    def __init__(self, part: Part, micro_batches: int, loss: Loss) -> None:
        self._part = part
        self._micro_batches = micro_batches
        self._loss = loss

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        pairs = zip(inputs.chunk(self._micro_batches), targets.chunk(self._micro_batches), strict=True)
        for number, (batch, wanted) in enumerate(pairs):
            with gradient_sync(self._part.module, wanted=number == self._micro_batches - 1):
                share = self._loss(self._part.module(batch), wanted)
                share.backward()  # type: ignore[no-untyped-call]  # torch's
            total += share.detach().double()
        return total


class Pipeline:
    """GPipe, 1F1B or interleaved 1F1B of torch.distributed.pipelining."""

    def __init__(self, layout: Layout, meshes: Meshes, parts: Sequence[Part], build: Build, loss: Loss) -> None:
        stages = [_stage(layout, meshes, part, build) for part in parts]
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        self._schedule = _schedule(layout, stages, loss)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (inputs,) if self._is_first else ()
        target = targets if self._is_last else None
        self._schedule.step(*given, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for loss in losses:
            total += loss.detach().double()
        return total


def _schedule(
    layout: Layout, stages: list[PipelineStage], loss: Loss
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    count = layout.micro_batches
    if layout.schedule.name is ScheduleName.INTERLEAVED:
        return ScheduleInterleaved1F1B(list(stages), count, loss_fn=loss, scale_grads=False)
    # With fewer micro-batches than stages 1F1B has no steady state: it is GPipe.
    one_f_one_b = layout.schedule.name is ScheduleName.ONE_F_ONE_B and count >= layout.groups
    return (Schedule1F1B if one_f_one_b else ScheduleGPipe)(stages[0], count, loss_fn=loss, scale_grads=False)


def _stage(layout: Layout, meshes: Meshes, part: Part, build: Build) -> PipelineStage:
    """With its shapes told beforehand: to find them out would run the model once, and its gradient hooks with it."""
    return PipelineStage(
        part.module,
        part.stage,
        len(layout.stages),
        torch.device(build.device),
        input_args=_example(layout, build, part.model.held.start),
        output_args=_example(layout, build, part.model.held.stop),
        group=meshes.pipeline,
    )


def _example(layout: Layout, build: Build, layer: int) -> Tensor:
    """A tensor of the form in which the input of `layer` travels, or behind the last layer its output."""
    behind = layer == len(layout.layers)
    samples, tokens = spreads_of(layout, build.size.sequence)[min(layer, len(layout.layers) - 1)].shape
    if layer == 0:
        return torch.empty(samples, tokens, dtype=torch.int64, device="meta")
    width = build.size.vocabulary if behind else build.size.hidden
    return torch.empty(samples, tokens, width, dtype=build.dtype, device="meta", requires_grad=True)
