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
from scheduler.trainer.activation_sharding import TokenSharding, compute_stage_handoff, compute_token_shardings
from scheduler.trainer.layout import Layout
from scheduler.trainer.mesh import Meshes
from scheduler.trainer.model_parts import BuildOptions, ModelPart, gradient_sync

LossFunction = Callable[[Tensor, Tensor], Tensor]


class ForwardBackward(Protocol):
    """Leaves gradients in the parameters, summed over all ranks that share them."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Both of shape (micro-batches x samples, tokens): what this rank's first and last layers work on.

        Returns this rank's share of the global batch's mean loss, zero where its part has no head.
        """


def build_forward_backward(
    layout: Layout, meshes: Meshes, parts: Sequence[ModelPart], options: BuildOptions
) -> ForwardBackward:
    loss = build_loss_share(layout, tokens=options.size.sequence)
    if layout.schedule.name is ScheduleName.INTERLEAVED:
        return InterleavedSchedule(layout, meshes, parts, options, loss)
    [part] = parts
    return NonInterleavedSchedule(layout, meshes, part, options, loss)


def build_loss_share(layout: Layout, *, tokens: int) -> LossFunction:
    """Cross-entropy over some cells as their share of the mean over all cells of a step."""
    cells = layout.global_batch * tokens

    def share(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / cells

    return share


class StageLink:
    """Tensors of one shape between this rank and one of a neighbouring stage, one under way at a time. Without such a
    rank they are empty."""

    def __init__(self, peer: int | None, shape: tuple[int, ...], options: BuildOptions) -> None:
        self._peer = peer
        self._shape = shape
        self._options = options
        self._pending_send: tuple[dist.Work, Tensor] | None = None

    def receive(self, group: dist.ProcessGroup | None) -> Tensor:
        buffer = torch.empty(self._shape, dtype=self._options.dtype, device=self._options.device)
        if self._peer is not None:
            dist.recv(buffer, self._peer, group)
        return buffer

    def send(self, message: Tensor, group: dist.ProcessGroup | None) -> None:
        """Once the last one has arrived; and goes on."""
        self.wait()
        if self._peer is not None:
            kept = message.contiguous()
            work = dist.isend(kept, self._peer, group)
            assert work is not None, "this rank is in the group"
            self._pending_send = work, kept

    def wait(self) -> None:
        """Waits for what is under way."""
        if self._pending_send is not None:
            self._pending_send[0].wait()
            self._pending_send = None


class NonInterleavedSchedule:
    """One stage, which does a forward and a backward pass in turn. Forward passes are ahead by the stages that follow
    (1F1B, PipeDream-Flush, arXiv 2006.09503, section 2.2) or by all micro-batches (GPipe, arXiv 1811.06965).

    Neighbouring stages may have unlike numbers of ranks, which no schedule of torch.distributed.pipelining knows of.
    """

    def __init__(
        self, layout: Layout, meshes: Meshes, part: ModelPart, options: BuildOptions, loss: LossFunction
    ) -> None:
        last = len(layout.stages) - 1
        spreads = compute_token_shardings(layout, options.size.sequence)
        self._part, self._loss, self._backward_group = part, loss, meshes.backward_group
        self._micro_batches = layout.micro_batches
        all_ahead = layout.schedule.name is ScheduleName.GPIPE and last > 0
        self._warmup_passes = self._micro_batches if all_ahead else last - part.stage
        self._previous_link = (
            _connect_stage(layout, compute_stage_handoff(layout, spreads, part.stage - 1)[1], options, -1)
            if part.stage
            else None
        )
        self._next_link = (
            _connect_stage(layout, compute_stage_handoff(layout, spreads, part.stage)[0], options, 1)
            if part.stage < last
            else None
        )

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        begun: deque[tuple[Tensor, Tensor]] = deque()
        for number in range(self._micro_batches + self._warmup_passes):
            if number < self._micro_batches:
                entered, left = self._forward(number, inputs)
                if self._next_link is None:
                    left = self._loss(left, targets.chunk(self._micro_batches)[number])
                    total += left.detach().double()
                begun.append((entered, left))
            if number >= self._warmup_passes:
                self._backward(number - self._warmup_passes, *begun.popleft())
        for link in (self._previous_link, self._next_link):
            if link is not None:
                link.wait()
        return total

    def _forward(self, number: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What entered this stage, and what left it."""
        if self._previous_link is None:
            entered = inputs.chunk(self._micro_batches)[number]
        else:
            entered = self._previous_link.receive(None).requires_grad_()
        with gradient_sync(self._part.module, enabled=number == self._micro_batches - 1):
            left: Tensor = self._part.module(entered)
        if self._next_link is not None:
            self._next_link.send(left.detach(), None)
        return entered, left

    def _backward(self, number: int, entered: Tensor, left: Tensor) -> None:
        gradient = None if self._next_link is None else self._next_link.receive(self._backward_group)
        # A first stage of frozen layers has nothing to learn.
        if left.requires_grad:
            with gradient_sync(self._part.module, enabled=number == self._micro_batches - 1):
                torch.autograd.backward(left, gradient)
        if self._previous_link is not None:
            assert entered.grad is not None, "a received tensor has one, whatever is frozen"
            self._previous_link.send(entered.grad, self._backward_group)


def _connect_stage(layout: Layout, sharding: TokenSharding, options: BuildOptions, towards: int) -> StageLink:
    """To the rank with this rank's number in the group before (-1) or behind (1), where there is one."""
    number, others = layout.rank_in_group(options.rank), layout.ranks_in_group(layout.group_of(options.rank) + towards)
    peer = others[number] if number < len(others) else None
    return StageLink(peer, (*sharding.shape(number), options.size.hidden), options)


class InterleavedSchedule:
    """Interleaved 1F1B of torch.distributed.pipelining, over groups of equal width."""

    def __init__(
        self, layout: Layout, meshes: Meshes, parts: Sequence[ModelPart], options: BuildOptions, loss: LossFunction
    ) -> None:
        stages = [_build_stage(layout, meshes, part, options) for part in parts]
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


def _build_stage(layout: Layout, meshes: Meshes, part: ModelPart, options: BuildOptions) -> PipelineStage:
    """With its shapes told beforehand: to find them out would run the model once, and its gradient hooks with it."""
    return PipelineStage(
        part.module,
        part.stage,
        len(layout.stages),
        torch.device(options.device),
        input_args=_make_example(layout, options, part.model.layer_range.start),
        output_args=_make_example(layout, options, part.model.layer_range.stop),
        group=meshes.pipeline_group,
    )


def _make_example(layout: Layout, options: BuildOptions, layer: int) -> Tensor:
    """A tensor of the form in which the input of `layer` travels, or behind the last layer its output."""
    behind = layer == len(layout.strategies)
    samples, tokens = compute_token_shardings(layout, options.size.sequence)[
        min(layer, len(layout.strategies) - 1)
    ].shape(0)
    if layer == 0:
        return torch.empty(samples, tokens, dtype=torch.int64, device="meta")
    width = options.size.vocabulary if behind else options.size.hidden
    return torch.empty(samples, tokens, width, dtype=options.dtype, device="meta", requires_grad=True)
