"""Training steps on sequences of unlike lengths, with sequence-parallel groups of unlike degrees (FlexSP).

The process groups of all degrees are made once. Each batch then gets the groups that the solver chooses for its lengths
(arXiv 2412.01523). Every rank holds all weights. A group runs its sequences one after the other, and the gradients are
summed over all ranks at the end of the step, so groups never wait for each other within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from scheduler.solver.lengths.batch_plan import BatchPlan, MicroBatch
from scheduler.trainer.context_parallel import ContextGroups, compute_token_positions, context_attention
from scheduler.trainer.dropout import SequenceTokens
from scheduler.trainer.model import Block, Gpt, causal_attention

IGNORED_TARGET = -100
"""Target of a token that only pads its sequence to a multiple of the degree (the default of torch's cross-entropy)."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The group of this rank in a micro-batch, this rank's place in it, and the sequences that the group computes."""

    degree: int
    index: int
    sequences: tuple[int, ...]


class SequenceGroups:
    """The process groups of every degree, of which this rank belongs to one each."""

    def __init__(self, degrees: Sequence[int]) -> None:
        """Make the groups. Collective over all ranks. A group of degree s begins at a rank that is a multiple of s."""
        self._own: dict[int, dist.ProcessGroup] = {}
        world, rank = dist.get_world_size(), dist.get_rank()
        for degree in degrees:
            for first in range(0, world - degree + 1, degree) if degree > 1 else ():
                group = dist.new_group(list(range(first, first + degree)))
                if first <= rank < first + degree:
                    self._own[degree] = group

    def select(self, model: Gpt, degree: int, index: int, tokens: int) -> Tensor:
        """Have the model attend within the group of `degree`, and return the positions of this rank's tokens."""
        positions = compute_token_positions(tokens=tokens, ulysses=degree, ring=1, index=index)
        positions = positions.to(next(model.parameters()).device)
        attend = causal_attention
        if degree > 1:
            attend = partial(context_attention, groups=ContextGroups(self._own[degree], None))
        for layer in model.blocks.values():
            assert isinstance(layer, Block)
            layer.attention.attend = attend
        assert model.embedding is not None, "a rank holds the whole model"
        model.embedding.token_positions = positions
        return positions


def list_degrees(world: int, *, heads: int) -> tuple[int, ...]:
    """Return the powers of two up to the number of ranks that divide the heads."""
    return tuple(1 << power for power in range(world.bit_length()) if heads % (1 << power) == 0)


def locate_group(micro_batch: MicroBatch, rank: int) -> RankGroup:
    """Return the group of `rank`. Groups take consecutive ranks in descending order of degree."""
    first = 0
    for group in micro_batch.groups:
        if rank < first + group.degree:
            return RankGroup(group.degree, rank - first, group.sequences)
        first += group.degree
    raise ValueError(f"rank is {rank}; the groups of the micro-batch have {first} ranks")


def run_micro_batches(
    model: Gpt,
    groups: SequenceGroups,
    plan: BatchPlan,
    sequences: Sequence[Tensor],
    *,
    first_tokens: Sequence[int] = (),
    loss_scale: Tensor | None = None,
) -> Tensor:
    """Run this rank's forward and backward passes of a batch. Collective over the groups.

    Args:
        sequences: tokens of each sequence, 1-D, one more than its length: each is the target of the one before it.
        first_tokens: number of each sequence's first token among all tokens of the training, for dropout.
        loss_scale: factor of the loss and all gradients; None means 1.

    Returns:
        This rank's share of the mean loss over all tokens of the batch, times the scale.
    """
    token_count = sum(len(sequence) - 1 for sequence in sequences)
    weight = next(model.parameters())
    total = torch.zeros((), dtype=weight.dtype, device=weight.device)
    for micro_batch in plan.micro_batches:
        own = locate_group(micro_batch, dist.get_rank())
        for number in own.sequences:
            inputs, targets = _pad(sequences[number].to(weight.device), own.degree)
            positions = groups.select(model, own.degree, own.index, len(inputs))
            first_token = first_tokens[number] if first_tokens else 0
            model.token_numbers = SequenceTokens(model.layer_range, first_token + positions)
            logits = model(inputs[positions].unsqueeze(0)).flatten(0, 1)
            loss = functional.cross_entropy(logits, targets[positions], reduction="sum") / token_count
            loss = loss if loss_scale is None else loss * loss_scale
            torch.autograd.backward(loss)
            total += loss.detach()
    return total


def _pad(sequence: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, padded at the end to a multiple of `degree`. No token attends to later padding."""
    missing = -(len(sequence) - 1) % degree
    inputs = functional.pad(sequence[:-1], (0, missing))
    return inputs, functional.pad(sequence[1:], (0, missing), value=IGNORED_TARGET)


def sum_gradients(model: Gpt) -> None:
    """Sum the gradients over all ranks, also of ranks that had no sequence. Collective."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
