"""Forward and backward passes of one step, micro-batch by micro-batch, on one group of ranks or through a pipeline."""

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
    """Runner of all micro-batches of a step.

    It leaves gradients in the parameters, summed over the ranks that share them.
    """

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the step on the inputs of this rank's first layer and the targets of its last layer.

        Both have the shape (micro-batches x samples, tokens).

        Returns:
            This rank's share of the loss, as the loss function scales it; zero if its parts contain no head.
        """

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward passes alone, and return this rank's share of the loss."""


def build_forward_backward(
    layout: Layout,
    meshes: Meshes,
    parts: Sequence[ModelPart],
    options: BuildOptions,
    *,
    loss_scale: Tensor | None = None,
) -> ForwardBackward:
    """Return the runner of the layout's schedule.

    Args:
        loss_scale: factor of the loss and all gradients, read in each pass; None means 1.
    """
    loss = build_loss_share(layout, tokens=options.size.sequence, scale=loss_scale)
    if layout.schedule.name is ScheduleName.INTERLEAVED:
        return InterleavedSchedule(layout, meshes, parts, options, loss)
    [part] = parts
    return NonInterleavedSchedule(layout, meshes, part, options, loss)


def build_loss_share(layout: Layout, *, tokens: int, scale: Tensor | None = None) -> LossFunction:
    """Return the loss function of a micro-batch: cross-entropy as a share of the mean over all tokens of the step."""
    token_count = layout.global_batch * tokens

    def compute_share(logits: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / token_count
        return loss if scale is None else loss * scale

    return compute_share


class StageLink:
    """Link that exchanges tensors of one shape between this rank and its peer in a neighboring stage.

    One send is pending at a time. Without a peer the tensors are empty.
    """

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
        """Start to send, after the previous send has arrived."""
        self.wait()
        if self._peer is not None:
            # Keep a reference to the buffer until the send has completed.
            buffer = message.contiguous()
            work = dist.isend(buffer, self._peer, group)
            assert work is not None, "this rank is in the group"
            self._pending_send = work, buffer

    def wait(self) -> None:
        """Wait for the pending send."""
        if self._pending_send is not None:
            self._pending_send[0].wait()
            self._pending_send = None


class NonInterleavedSchedule:
    """The schedule of a single stage per rank: forward and backward passes alternate after the warm-up.

    The number of warm-up forward passes is that of the following stages (1F1B, PipeDream-Flush, arXiv 2006.09503,
    section 2.2) or of all micro-batches (GPipe, arXiv 1811.06965). The schedules of torch.distributed.pipelining
    cannot be used, because neighboring stages may have different numbers of ranks.
    """

    def __init__(
        self, layout: Layout, meshes: Meshes, part: ModelPart, options: BuildOptions, loss: LossFunction
    ) -> None:
        last_stage = len(layout.stages) - 1
        shardings = compute_token_shardings(layout, options.size.sequence)
        self._part, self._loss, self._backward_group = part, loss, meshes.backward_group
        self._micro_batches = layout.micro_batches
        self._returns_gradient = _needs_gradient(part.model.layer_range.start, options.frozen_blocks)
        self._awaits_gradient = _needs_gradient(part.model.layer_range.stop, options.frozen_blocks)
        is_gpipe = layout.schedule.name is ScheduleName.GPIPE and last_stage > 0
        self._warmup_passes = self._micro_batches if is_gpipe else last_stage - part.stage
        self._previous_link = self._next_link = None
        if part.stage > 0:
            _, arriving = compute_stage_handoff(layout, shardings, part.stage - 1)
            self._previous_link = _connect_stage(layout, arriving, options, -1)
        if part.stage < last_stage:
            leaving, _ = compute_stage_handoff(layout, shardings, part.stage)
            self._next_link = _connect_stage(layout, leaving, options, 1)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        awaiting_backward: deque[tuple[Tensor, Tensor]] = deque()
        for number in range(self._micro_batches + self._warmup_passes):
            if number < self._micro_batches:
                stage_input, output = self._forward(number, inputs)
                if self._next_link is None:
                    output = self._loss(output, targets.chunk(self._micro_batches)[number])
                    total += output.detach().double()
                awaiting_backward.append((stage_input, output))
            if number >= self._warmup_passes:
                self._backward(number - self._warmup_passes, *awaiting_backward.popleft())
        self._finish_sends()
        return total

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for number in range(self._micro_batches):
            _, output = self._forward(number, inputs)
            if self._next_link is None:
                total += self._loss(output, targets.chunk(self._micro_batches)[number]).double()
        self._finish_sends()
        return total

    def _finish_sends(self) -> None:
        for link in (self._previous_link, self._next_link):
            if link is not None:
                link.wait()

    def _forward(self, number: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run a forward pass and return the stage's input and output."""
        if self._previous_link is None:
            stage_input = inputs.chunk(self._micro_batches)[number]
        else:
            stage_input = self._previous_link.receive(None).requires_grad_(self._returns_gradient)
        with gradient_sync(self._part.module, enabled=number == self._micro_batches - 1):
            output: Tensor = self._part.module(stage_input)
        if self._next_link is not None:
            self._next_link.send(output.detach(), None)
        return stage_input, output

    def _backward(self, number: int, stage_input: Tensor, output: Tensor) -> None:
        gradient = None
        if self._next_link is not None and self._awaits_gradient:
            gradient = self._next_link.receive(self._backward_group)
        # If all layers up to here are frozen, the output requires no gradient.
        if output.requires_grad:
            with gradient_sync(self._part.module, enabled=number == self._micro_batches - 1):
                torch.autograd.backward(output, gradient)
        if self._previous_link is not None and self._returns_gradient:
            assert stage_input.grad is not None, "a received tensor requires a gradient"
            self._previous_link.send(stage_input.grad, self._backward_group)


def _needs_gradient(layer: int, frozen_blocks: int) -> bool:
    """Return whether the input of `layer` needs a gradient: some layer before it is trained.

    With any block frozen, the embedding (layer 0) is frozen too, so that layers 0 to `frozen_blocks` are.
    """
    return layer > 0 and (frozen_blocks == 0 or layer - 1 > frozen_blocks)


def _connect_stage(layout: Layout, sharding: TokenSharding, options: BuildOptions, direction: int) -> StageLink:
    """Link to the rank with the same number in the previous (-1) or next (1) group, if it exists."""
    number = layout.rank_in_group(options.rank)
    peers = layout.ranks_in_group(layout.group_of(options.rank) + direction)
    peer = peers[number] if number < len(peers) else None
    return StageLink(peer, (*sharding.shape(number), options.size.hidden), options)


class InterleavedSchedule:
    """Interleaved 1F1B of torch.distributed.pipelining, over groups of equal size."""

    def __init__(
        self, layout: Layout, meshes: Meshes, parts: Sequence[ModelPart], options: BuildOptions, loss: LossFunction
    ) -> None:
        stages = [_build_stage(layout, meshes, part, options) for part in parts]
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        self._schedule = ScheduleInterleaved1F1B(list(stages), layout.micro_batches, loss_fn=loss, scale_grads=False)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._run(self._schedule.step, inputs, targets)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._run(self._schedule.eval, inputs, targets)

    def _run(self, run: Callable[..., object], inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        stage_inputs = (inputs,) if self._is_first else ()
        target = targets if self._is_last else None
        run(*stage_inputs, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for loss in losses:
            total += loss.detach().double()
        return total


def _build_stage(layout: Layout, meshes: Meshes, part: ModelPart, options: BuildOptions) -> PipelineStage:
    """Return the stage with its shapes. torch would run the model, and its gradient hooks, to infer them."""
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
    """Return a meta tensor with the shape and dtype of the input of `layer`, or of the output behind the last layer."""
    last_layer = len(layout.strategies) - 1
    sharding = compute_token_shardings(layout, options.size.sequence)[min(layer, last_layer)]
    samples, tokens = sharding.shape(0)
    if layer == 0:
        return torch.empty(samples, tokens, dtype=torch.int64, device="meta")
    width = options.size.vocabulary if layer > last_layer else options.size.hidden
    return torch.empty(samples, tokens, width, dtype=options.dtype, device="meta", requires_grad=True)
