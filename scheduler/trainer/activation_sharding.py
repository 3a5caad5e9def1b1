"""Relayout: hands activations from ranks that work on one part of a micro-batch each to ranks that work on another.

Neighbouring layers may follow unlike strategies: one with tensor parallelism over half of the batch, the next with data
parallelism over a quarter. A cell is one token of one sample. Each rank of a pipeline group knows which cells it has
and which it needs, so that one all-to-all moves every missing cell once.

Which cells of a micro-batch each rank works on, layer by layer, and how stages hand them over.

A cell is one token of one sample. Micro-batches are those of the plan: all stages cut them into the same cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.context_parallel import compute_token_positions
from scheduler.trainer.layout import Layout, locate_rank


@dataclass(frozen=True, eq=False)
class TokenSharding:
    """The cells of one micro-batch by rank of the group: `cells[rank]`, 1-D int64, in the order in which the rank holds
    them; of the ranks that hold a cell, `copies` consecutive ones hold equal copies of all their cells."""

    token_indices: tuple[Tensor, ...]
    samples: int
    """Of each rank's part, which has as many tokens of each."""
    copies: int

    def shape(self, rank: int) -> tuple[int, int]:
        """Samples and tokens of the part of a rank."""
        return self.samples, len(self.token_indices[rank]) // self.samples

    @cached_property
    def owners(self) -> Tensor:
        """Shape (copies, cells, 2): the rank that has each copy of each cell, and where in its part."""
        found = torch.empty(self.copies, sum(map(len, self.token_indices)) // self.copies, 2, dtype=torch.int64)
        for rank, held in enumerate(self.token_indices):
            found[rank % self.copies, held, 0] = rank
            found[rank % self.copies, held, 1] = torch.arange(len(held))
        return found


@dataclass(frozen=True, eq=False, slots=True)
class TokenRoute:
    """What one rank sends and receives to come from one spread to another."""

    send: Tensor
    send_counts: list[int]
    receive: Tensor
    receive_counts: list[int]
    shape: tuple[int, int]


def plan_route(current: TokenSharding, target: TokenSharding, *, rank: int) -> TokenRoute:
    """Every rank takes a cell from the copy with its own number, so that copies share the work."""
    sources = [current.owners[other % current.copies, cells] for other, cells in enumerate(target.token_indices)]
    sends = [source[source[:, 0] == rank, 1] for source in sources]
    receives = [torch.nonzero(sources[rank][:, 0] == other).flatten() for other in range(len(current.token_indices))]
    return TokenRoute(torch.cat(sends), _lengths(sends), torch.cat(receives), _lengths(receives), target.shape(rank))


class TokenRedistribution:
    """A callable on activations of shape (samples, tokens, hidden), differentiable.

    Gradients travel the same way back. A copy's gradient is the whole one, as tensor-parallel layers give it.
    """

    def __init__(self, current: TokenSharding, target: TokenSharding, *, rank: int, group: dist.ProcessGroup) -> None:
        self._forward_route = plan_route(current, target, rank=rank)
        self._backward_route = plan_route(target, current, rank=rank)
        self._group = group

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _MoveTokens.apply(inputs, self._forward_route, self._backward_route, self._group)  # type: ignore[no-untyped-call]  # torch's
        return outputs


class _MoveTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, there: TokenRoute, back: TokenRoute, group: dist.ProcessGroup) -> Tensor:
        ctx.back, ctx.there, ctx.group = back, there, group
        return _move_tokens(inputs, there, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _move_tokens(gradients[0], ctx.back, ctx.group), None, None, None


def _move_tokens(inputs: Tensor, route: TokenRoute, group: dist.ProcessGroup) -> Tensor:
    rows = inputs.flatten(0, 1)
    sent = rows[route.send.to(inputs.device)].contiguous()
    got = inputs.new_empty(len(route.receive), inputs.shape[-1])
    dist.all_to_all_single(got, sent, route.receive_counts, route.send_counts, group=group)
    outputs = torch.empty_like(got)
    outputs[route.receive.to(inputs.device)] = got
    return outputs.view(*route.shape, inputs.shape[-1])


def _lengths(parts: Sequence[Tensor]) -> list[int]:
    return [len(part) for part in parts]


def compute_token_shardings(layout: Layout, tokens: int) -> tuple[TokenSharding, ...]:
    """Of each layer, over the ranks of its group; one and the same where neighbours of one group are alike."""
    known: dict[tuple[int, ...], TokenSharding] = {}
    found = []
    for number, one in enumerate(layout.strategies):
        # Embedding and head have whole sequences on each tensor-parallel rank: their own split is by vocabulary.
        by_tokens = one.sequence_sharding and 0 < number < len(layout.strategies) - 1
        key = (one.tp, one.dp, one.ulysses, one.ring, by_tokens)
        if key not in known:
            known[key] = _shard_tokens(layout, one, tokens, by_tokens=by_tokens)
        found.append(known[key])
    return tuple(found)


def find_sharding_changes(
    layer_range: range, layout: Layout, shardings: Sequence[TokenSharding]
) -> Iterator[tuple[int, TokenSharding, TokenSharding]]:
    """In front of which layer of a stage, and behind its last one, the cells go from which spread to which."""
    stage = layout.stages.index(layer_range)
    if stage > 0:
        yield layer_range.start, compute_stage_handoff(layout, shardings, stage - 1)[1], shardings[layer_range.start]
    yield from ((number, shardings[number - 1], shardings[number]) for number in layer_range[1:])
    if stage < len(layout.stages) - 1:
        yield layer_range.stop, shardings[layer_range.stop - 1], compute_stage_handoff(layout, shardings, stage)[0]


def _shard_tokens(layout: Layout, strategy: LayerStrategy, tokens: int, *, by_tokens: bool) -> TokenSharding:
    cells, samples = [], range(0)
    for rank in range(strategy.gpus):
        here, samples = locate_rank(strategy, rank), layout.sample_range(strategy, rank)
        places = compute_token_positions(
            tokens=tokens, ulysses=strategy.ulysses, ring=strategy.ring, index=here.context_index(strategy)
        )
        if by_tokens:
            places = places.chunk(strategy.tp)[here.tp]
        cells.append((torch.tensor(samples)[:, None] * tokens + places[None, :]).flatten())
    return TokenSharding(tuple(cells), len(samples), copies=1 if by_tokens else strategy.tp)


def compute_stage_handoff(
    layout: Layout, shardings: Sequence[TokenSharding], stage: int
) -> tuple[TokenSharding, TokenSharding]:
    """How a micro-batch lies on the ranks of `stage` when it leaves for the next one, and on theirs when it arrives.

    Each rank sends to the one with its number in the next group. Groups of equal width hand over what the receiver
    works on. Of others the narrower one's ranks have equal shares of the cells, and so have as many of the wider one's.
    """
    begin = layout.stages[stage + 1].start
    here, there = len(shardings[begin - 1].token_indices), len(shardings[begin].token_indices)
    if here == there:
        return shardings[begin], shardings[begin]
    cells = shardings[begin].owners.shape[1]
    parts = torch.arange(cells).tensor_split(min(here, there))
    return _build_handoff_sharding(parts, here), _build_handoff_sharding(parts, there)


def _build_handoff_sharding(parts: Sequence[torch.Tensor], ranks: int) -> TokenSharding:
    nothing = torch.empty(0, dtype=torch.int64)
    return TokenSharding((*parts, *[nothing] * (ranks - len(parts))), samples=1, copies=1)
