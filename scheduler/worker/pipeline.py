"""Forward and backward of one step: micro-batch by micro-batch, on one group of ranks or through a pipeline of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn import functional

from scheduler.domain.parallel_plan import ScheduleName
from scheduler.worker.layout import Layout
from scheduler.worker.mesh import Meshes
from scheduler.worker.parallel import Build, Part, gradient_sync
from scheduler.worker.relayout import Spread
from scheduler.worker.spreads import hand_over, spreads_of

Loss = Callable[[Tensor, Tensor], Tensor]


class ForwardBackward(Protocol):
    """Leaves gradients in the parameters, summed over all ranks that share them."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Both of shape (micro-batches x samples, tokens): what this rank's first and last layers work on.

        Returns this rank's share of the global batch's mean loss, zero where its part has no head.
        """


def forward_backward(layout: Layout, meshes: Meshes, parts: Sequence[Part], build: Build) -> ForwardBackward:
    loss = share_of_loss(layout, tokens=build.size.sequence)
    if layout.schedule.name is ScheduleName.INTERLEAVED:
        return Interleaved(layout, meshes, parts, build, loss)
    [part] = parts
    return InTurn(layout, meshes, part, build, loss)


def share_of_loss(layout: Layout, *, tokens: int) -> Loss:
    """Cross-entropy over some cells as their share of the mean over all cells of a step."""
    cells = layout.global_batch * tokens

    def share(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / cells

    return share


class Link:
    """Tensors of one shape between this rank and one of a neighbouring stage, one under way at a time. Without such a
    rank they are empty."""

    def __init__(self, peer: int | None, shape: tuple[int, ...], build: Build) -> None:
        self._peer = peer
        self._shape = shape
        self._build = build
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def receive(self, group: dist.ProcessGroup | None) -> Tensor:
        buffer = torch.empty(self._shape, dtype=self._build.dtype, device=self._build.device)
        if self._peer is not None:
            dist.recv(buffer, self._peer, group)
        return buffer

    def send(self, message: Tensor, group: dist.ProcessGroup | None) -> None:
        """Once the last one has arrived; and goes on."""
        self.finish()
        if self._peer is not None:
            kept = message.contiguous()
            work = dist.isend(kept, self._peer, group)
            assert work is not None, "this rank is in the group"
            self._under_way = work, kept

    def finish(self) -> None:
        """Waits for what is under way."""
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None


class InTurn:
    """One stage, which does a forward and a backward pass in turn. Forward passes are ahead by the stages that follow
    (1F1B, PipeDream-Flush, arXiv 2006.09503, section 2.2) or by all micro-batches (GPipe, arXiv 1811.06965).

    Neighbouring stages may have unlike numbers of ranks, which no schedule of torch.distributed.pipelining knows of.
    """

    def __init__(self, layout: Layout, meshes: Meshes, part: Part, build: Build, loss: Loss) -> None:
        last = len(layout.stages) - 1
        spreads = spreads_of(layout, build.size.sequence)
        self._part, self._loss, self._back = part, loss, meshes.back
        self._count = layout.micro_batches
        all_ahead = layout.schedule.name is ScheduleName.GPIPE and last > 0
        self._ahead = self._count if all_ahead else last - part.stage
        self._before = _link(layout, hand_over(layout, spreads, part.stage - 1)[1], build, -1) if part.stage else None
        self._behind = _link(layout, hand_over(layout, spreads, part.stage)[0], build, 1) if part.stage < last else None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        begun: deque[tuple[Tensor, Tensor]] = deque()
        for number in range(self._count + self._ahead):
            if number < self._count:
                entered, left = self._forward(number, inputs)
                if self._behind is None:
                    left = self._loss(left, targets.chunk(self._count)[number])
                    total += left.detach().double()
                begun.append((entered, left))
            if number >= self._ahead:
                self._backward(number - self._ahead, *begun.popleft())
        for link in (self._before, self._behind):
            if link is not None:
                link.finish()
        return total

    def _forward(self, number: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What entered this stage, and what left it."""
        if self._before is None:
            entered = inputs.chunk(self._count)[number]
        else:
            entered = self._before.receive(None).requires_grad_()
        with gradient_sync(self._part.module, wanted=number == self._count - 1):
            left: Tensor = self._part.module(entered)
        if self._behind is not None:
            self._behind.send(left.detach(), None)
        return entered, left

    def _backward(self, number: int, entered: Tensor, left: Tensor) -> None:
        gradient = None if self._behind is None else self._behind.receive(self._back)
        # A first stage of frozen layers has nothing to learn.
        if left.requires_grad:
            with gradient_sync(self._part.module, wanted=number == self._count - 1):
                torch.autograd.backward(left, gradient)
        if self._before is not None:
            assert entered.grad is not None, "a received tensor has one, whatever is frozen"
            self._before.send(entered.grad, self._back)


def _link(layout: Layout, spread: Spread, build: Build, towards: int) -> Link:
    """To the rank with this rank's number in the group before (-1) or behind (1), where there is one."""
    number, others = layout.number_in_group(build.rank), layout.ranks_of(layout.group_of(build.rank) + towards)
    peer = others[number] if number < len(others) else None
    return Link(peer, (*spread.shape(number), build.size.hidden), build)


class Interleaved:
    """Interleaved 1F1B of torch.distributed.pipelining, over groups of equal width."""

    def __init__(self, layout: Layout, meshes: Meshes, parts: Sequence[Part], build: Build, loss: Loss) -> None:
        stages = [_stage(layout, meshes, part, build) for part in parts]
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        self._schedule = ScheduleInterleaved1F1B(list(stages), layout.micro_batches, loss_fn=loss, scale_grads=False)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (inputs,) if self._is_first else ()
        target = targets if self._is_last else None
        self._schedule.step(*given, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for loss in losses:
            total += loss.detach().double()
        return total


def _stage(layout: Layout, meshes: Meshes, part: Part, build: Build) -> PipelineStage:
    """With its shapes told beforehand: to find them out would run the model once, and its gradient hooks with it."""
    return PipelineStage(
        part.module,
        part.stage,
        len(layout.stages),
        torch.device(build.device),
        input_args=_example(layout, build, part.model.held.start),
        output_args=_example(layout, build, part.model.held.stop),
        group=meshes.column,
    )


def _example(layout: Layout, build: Build, layer: int) -> Tensor:
    """A tensor of the form in which the input of `layer` travels, or behind the last layer its output."""
    behind = layer == len(layout.layers)
    samples, tokens = spreads_of(layout, build.size.sequence)[min(layer, len(layout.layers) - 1)].shape(0)
    if layer == 0:
        return torch.empty(samples, tokens, dtype=torch.int64, device="meta")
    width = build.size.vocabulary if behind else build.size.hidden
    return torch.empty(samples, tokens, width, dtype=build.dtype, device="meta", requires_grad=True)
