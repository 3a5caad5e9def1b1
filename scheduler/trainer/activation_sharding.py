"""How activations are sharded over the ranks of a pipeline group, and their redistribution between layers.

Neighboring layers may have different strategies: one with tensor parallelism over half of the batch, the next with
data parallelism over a quarter. Every rank knows which tokens of a micro-batch it has and which it needs, so one
all-to-all moves every missing token once. A token is numbered within its micro-batch, over all samples. All stages
cut the batch into the plan's micro-batches.
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
    """The tokens of one micro-batch by rank of the group.

    Attributes:
        token_indices: the tokens of each rank, in the order in which it holds them (1-D, int64).
        samples: number of samples in each rank's part, all with equally many tokens.
        copies: so many consecutive ranks hold equal copies of all their tokens.
    """

    token_indices: tuple[Tensor, ...]
    samples: int
    copies: int

    def shape(self, rank: int) -> tuple[int, int]:
        """Return the samples and tokens of a rank's part."""
        return self.samples, len(self.token_indices[rank]) // self.samples

    @cached_property
    def owners(self) -> Tensor:
        """The rank that holds each copy of each token, and the index in that rank's part.

        Shape (copies, tokens, 2).
        """
        owners = torch.empty(self.copies, sum(map(len, self.token_indices)) // self.copies, 2, dtype=torch.int64)
        for rank, tokens in enumerate(self.token_indices):
            owners[rank % self.copies, tokens, 0] = rank
            owners[rank % self.copies, tokens, 1] = torch.arange(len(tokens))
        return owners


def compute_token_shardings(layout: Layout, tokens: int) -> tuple[TokenSharding, ...]:
    """Return the sharding of each layer over the ranks of its group. Layers with equal strategies share one object."""
    computed: dict[tuple[int, ...], TokenSharding] = {}
    shardings = []
    for number, strategy in enumerate(layout.strategies):
        # Embedding and head need all tokens on each tensor-parallel rank: they are split by vocabulary.
        by_tokens = strategy.sequence_sharding and 0 < number < len(layout.strategies) - 1
        key = (strategy.tp, strategy.dp, strategy.ulysses, strategy.ring, by_tokens)
        if key not in computed:
            computed[key] = _shard_tokens(layout, strategy, tokens, by_tokens=by_tokens)
        shardings.append(computed[key])
    return tuple(shardings)


def find_sharding_changes(
    layer_range: range, layout: Layout, shardings: Sequence[TokenSharding]
) -> Iterator[tuple[int, TokenSharding, TokenSharding]]:
    """Yield (layer, current, target) for each boundary of a stage at which the sharding may change.

    Boundaries are in front of each layer, and at the stage's output.
    """
    stage = layout.stages.index(layer_range)
    if stage > 0:
        yield layer_range.start, compute_stage_handoff(layout, shardings, stage - 1)[1], shardings[layer_range.start]
    yield from ((number, shardings[number - 1], shardings[number]) for number in layer_range[1:])
    if stage < len(layout.stages) - 1:
        yield layer_range.stop, shardings[layer_range.stop - 1], compute_stage_handoff(layout, shardings, stage)[0]


def _shard_tokens(layout: Layout, strategy: LayerStrategy, tokens: int, *, by_tokens: bool) -> TokenSharding:
    token_indices, samples = [], range(0)
    for rank in range(strategy.gpus):
        coordinates, samples = locate_rank(strategy, rank), layout.sample_range(strategy, rank)
        positions = compute_token_positions(
            tokens=tokens, ulysses=strategy.ulysses, ring=strategy.ring, index=coordinates.context_index(strategy)
        )
        if by_tokens:
            positions = positions.chunk(strategy.tp)[coordinates.tp]
        token_indices.append((torch.tensor(samples)[:, None] * tokens + positions[None, :]).flatten())
    return TokenSharding(tuple(token_indices), len(samples), copies=1 if by_tokens else strategy.tp)


def compute_stage_handoff(
    layout: Layout, shardings: Sequence[TokenSharding], stage: int
) -> tuple[TokenSharding, TokenSharding]:
    """Return how a micro-batch is sharded when it leaves `stage`, and when it arrives at the next stage.

    Each rank sends to the rank with the same number in the next group. Groups of equal size hand over the sharding
    that the receiver needs. Otherwise the ranks of the smaller group, and as many of the larger one, hold equal
    shares.
    """
    first = layout.stages[stage + 1].start
    senders, receivers = len(shardings[first - 1].token_indices), len(shardings[first].token_indices)
    if senders == receivers:
        return shardings[first], shardings[first]
    tokens = shardings[first].owners.shape[1]
    parts = torch.arange(tokens).tensor_split(min(senders, receivers))
    return _build_handoff_sharding(parts, senders), _build_handoff_sharding(parts, receivers)


def _build_handoff_sharding(parts: Sequence[torch.Tensor], ranks: int) -> TokenSharding:
    empty = torch.empty(0, dtype=torch.int64)
    return TokenSharding((*parts, *[empty] * (ranks - len(parts))), samples=1, copies=1)


@dataclass(frozen=True, eq=False, slots=True)
class TokenRoute:
    """Cells that one rank sends and receives to change from one sharding to another."""

    send: Tensor
    send_counts: list[int]
    receive: Tensor
    receive_counts: list[int]
    shape: tuple[int, int]


def plan_route(current: TokenSharding, target: TokenSharding, *, rank: int) -> TokenRoute:
    """Return the route of a rank.

    Each rank takes tokens from the copy with its own number, so that copies share the work.
    """
    sources = [current.owners[other % current.copies, tokens] for other, tokens in enumerate(target.token_indices)]
    sends = [source[source[:, 0] == rank, 1] for source in sources]
    receives = [torch.nonzero(sources[rank][:, 0] == other).flatten() for other in range(len(current.token_indices))]
    return TokenRoute(torch.cat(sends), _lengths(sends), torch.cat(receives), _lengths(receives), target.shape(rank))


class TokenRedistribution:
    """A differentiable callable on activations of shape (samples, tokens, hidden).

    Gradients take the same route back. The gradient of each copy is complete, as tensor-parallel layers produce it.
    """

    def __init__(self, current: TokenSharding, target: TokenSharding, *, rank: int, group: dist.ProcessGroup) -> None:
        self._forward_route = plan_route(current, target, rank=rank)
        self._backward_route = plan_route(target, current, rank=rank)
        self._group = group

    def __call__(self, inputs: Tensor) -> Tensor:
        routes = self._forward_route, self._backward_route
        outputs: Tensor = _MoveTokens.apply(inputs, *routes, self._group)  # type: ignore[no-untyped-call]  # torch's
        return outputs


class _MoveTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, route: TokenRoute, backward_route: TokenRoute, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.backward_route, ctx.group = backward_route, group
        return _move_tokens(inputs, route, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _move_tokens(gradients[0], ctx.backward_route, ctx.group), None, None, None


def _move_tokens(inputs: Tensor, route: TokenRoute, group: dist.ProcessGroup) -> Tensor:
    rows = inputs.flatten(0, 1)
    sent = rows[route.send.to(inputs.device)].contiguous()
    received = inputs.new_empty(len(route.receive), inputs.shape[-1])
    dist.all_to_all_single(received, sent, route.receive_counts, route.send_counts, group=group)
    outputs = torch.empty_like(received)
    outputs[route.receive.to(inputs.device)] = received
    return outputs.view(*route.shape, inputs.shape[-1])


def _lengths(parts: Sequence[Tensor]) -> list[int]:
    return [len(part) for part in parts]
