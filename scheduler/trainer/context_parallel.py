"""Causal attention over a sequence that is split over ranks: Ulysses inside a ring (USP, arXiv 2405.07719).

The ranks of a Ulysses group exchange tokens for heads before attention and back after it (DeepSpeed-Ulysses, arXiv
2309.14509). In between each rank has all tokens of its group for a part of the heads.

The Ulysses groups form a ring, in which each has two chunks of the sequence. Keys and values rotate around the ring
while every rank attends to those it holds; an online softmax merges the results (Liu et al., Ring Attention with
Blockwise Transformers, arXiv 2310.01889). Chunks are assigned in zigzag order, so that under the causal mask every
rank has the same amount of work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from scheduler.trainer.precision import autocast_to

# Dimensions of (..., heads, tokens, head size), counted from the end so that stacked tensors work too.
_HEAD_DIM = -3
_TOKEN_DIM = -2
# Transfers of both kinds may be pending between the same two ranks.
_KEYS_VALUES_TAG = 0
_GRADIENTS_TAG = 1


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """The context-parallel groups of one rank; None for a dimension of one rank.

    The context index of a rank is `ring rank x ulysses size + ulysses rank`, the order of a mesh ("ring",
    "ulysses").
    """

    ulysses: ProcessGroup | None
    ring: ProcessGroup | None

    @property
    def ulysses_size(self) -> int:
        return self.ulysses.size() if self.ulysses is not None else 1

    @property
    def ring_size(self) -> int:
        return self.ring.size() if self.ring is not None else 1


def compute_token_positions(*, tokens: int, ulysses: int, ring: int, index: int) -> Tensor:
    """Return the positions in the sequence of the tokens that a rank holds, in its order: 1-D, int64, on the CPU.

    Chunks are assigned to ring ranks in zigzag order. The Ulysses ranks of a ring rank hold equal contiguous parts
    of its two chunks.

    Args:
        tokens: length of the sequence.
        ulysses: number of Ulysses ranks.
        ring: number of ring ranks.
        index: context index of the rank.

    Raises:
        ValueError: the sequence cannot be split like this, or `index` is out of range.
    """
    if not 0 <= index < ulysses * ring:
        raise ValueError(
            f"`index` is {index}. With ulysses {ulysses} x ring {ring} it must be 0 to {ulysses * ring - 1}."
        )
    # A ring rank holds two equal chunks, and equally many tokens per Ulysses rank.
    multiple = ring * lcm(2, ulysses) if ring > 1 else ulysses
    if tokens < 1 or tokens % multiple:
        raise ValueError(
            f"The sequence has {tokens} tokens. Use a multiple of {multiple} with ulysses {ulysses} x ring {ring}."
        )
    positions = torch.arange(tokens)
    if ring > 1:
        chunks = positions.chunk(2 * ring)
        positions = torch.cat([chunks[chunk] for chunk in assign_zigzag_chunks(ring, index // ulysses)])
    return positions.chunk(ulysses)[index % ulysses]


def context_attention(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> Tensor:
    """Return the causal attention over the whole sequence, for the tokens of this rank. Collective over both groups.

    Inputs and result have the shape (samples, heads, local tokens, head size). `compute_token_positions` says which
    tokens a rank holds.

    Raises:
        ValueError: the shapes differ, the Ulysses ranks do not divide the heads, or a ring rank has an odd number of
            tokens.
    """
    _validate_shapes(query, key, value, groups)
    if groups.ulysses is None or groups.ulysses_size == 1:
        return _attend_over_ring(query, key, value, groups)
    # Stacked, so that one message carries all three.
    stacked = _exchange_dimensions(torch.stack((query, key, value)), groups.ulysses, split=_HEAD_DIM, join=_TOKEN_DIM)
    query, key, value = stacked.unbind()
    attended = _attend_over_ring(query, key, value, groups)
    return _exchange_dimensions(attended, groups.ulysses, split=_TOKEN_DIM, join=_HEAD_DIM)


def _validate_shapes(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> None:
    if not query.shape == key.shape == value.shape:
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        raise ValueError(f"The shapes of query, key and value are {shapes}. They must be equal.")
    heads, tokens = query.shape[_HEAD_DIM], query.shape[_TOKEN_DIM]
    if heads % groups.ulysses_size:
        raise ValueError(f"There are {heads} heads. They must be a multiple of ulysses, {groups.ulysses_size}.")
    if groups.ring_size > 1 and tokens * groups.ulysses_size % 2:
        raise ValueError(
            f"A rank of ring {groups.ring_size} has {tokens} x ulysses {groups.ulysses_size} tokens. "
            "It must have an even number, because it holds two chunks of the sequence."
        )


def _attend_over_ring(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> Tensor:
    """Attend with some heads, given all tokens of this rank's Ulysses group."""
    if groups.ring is None or groups.ring_size == 1:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return ring_attention(query, key, value, groups.ring)


def _exchange_dimensions(tensor: Tensor, group: ProcessGroup, *, split: int, join: int) -> Tensor:
    exchanged: Tensor = _DimensionExchange.apply(tensor, group, split, join)  # type: ignore[no-untyped-call]  # torch's is untyped
    return exchanged


class _DimensionExchange(torch.autograd.Function):
    """All-to-all that splits dimension `split` over the ranks and joins received parts along `join`, in rank order."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _all_to_all(tensor, group, split=split, join=join)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.group, split=ctx.join, join=ctx.split), None, None, None


def _all_to_all(tensor: Tensor, group: ProcessGroup, *, split: int, join: int) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), split))
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)


class CausalBlock(NamedTuple):
    """Half the queries of one rank against half the keys of another. Half 0 is the earlier of a rank's two chunks.

    Attributes:
        diagonal: both halves are the same chunk, so the causal mask applies inside the block. In other blocks
            every query sees every key.
    """

    query_half: int
    key_half: int
    diagonal: bool


def assign_zigzag_chunks(ring: int, rank: int) -> tuple[int, int]:
    """Return which two of the `2 x ring` equal chunks of a sequence a ring rank holds, the earlier first."""
    return rank, 2 * ring - 1 - rank


def list_causal_blocks(ring: int, *, rank: int, source: int) -> list[CausalBlock]:
    """Return the blocks of `rank`'s queries against `source`'s keys that the causal mask leaves.

    These are three of four blocks against a rank's own keys, and two against those of any other rank.
    """
    return [
        CausalBlock(query_half, key_half, diagonal=queries == keys)
        for query_half, queries in enumerate(assign_zigzag_chunks(ring, rank))
        for key_half, keys in enumerate(assign_zigzag_chunks(ring, source))
        if keys <= queries
    ]


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> Tensor:
    """Return the causal attention over a ring. Collective over `group`.

    Rank r of the group holds the chunks `assign_zigzag_chunks(size, r)`. Inputs have the shape (samples, heads,
    tokens, head size) with an even number of tokens. Sums are computed in float32, or in float64 for float64 inputs.
    """
    with autocast_to(None, query.device):
        output: Tensor = _RingAttention.apply(query, key, value, group)  # type: ignore[no-untyped-call]  # torch's is untyped
    return output


class _RingAttention(torch.autograd.Function):
    """Ring attention that saves only the log-sum-exp and recomputes the probabilities in backward, block by block.

    This follows FlashAttention-2 (arXiv 2307.08691, section 3.1). The gradients of keys and values rotate one step
    behind the keys and values, and return to their rank after the last step.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> Tensor:
        queries = _scale_queries(query)
        output = torch.zeros_like(queries)
        log_sum = torch.full_like(queries[..., :1], -torch.inf)
        query_halves, output_halves, log_sum_halves = map(_split_halves, (queries, output, log_sum))
        for source, pair in _rotate_keys_values(torch.stack((key, value)), group):
            key_halves, value_halves = _split_halves(pair[0]), _split_halves(pair[1])
            for half, key_half, diagonal in list_causal_blocks(group.size(), rank=group.rank(), source=source):
                scores = _compute_scores(query_halves[half], key_halves[key_half], diagonal=diagonal)
                _merge_block(output_halves[half], log_sum_halves[half], scores, value_halves[key_half])
        output = output.to(query.dtype)
        ctx.group = group
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, log_sum = ctx.saved_tensors
        group: ProcessGroup = ctx.group
        queries = _QueryHalves.from_forward(query, output, log_sum, gradient)
        transfer: _RingTransfer | None = None
        for source, pair in _rotate_keys_values(torch.stack((key, value)), group):
            # Compute this rank's term while the sum of the previous ranks arrives.
            pair_gradient = torch.zeros(pair.shape, dtype=queries.query[0].dtype, device=pair.device)
            halves = [_split_halves(part) for part in (*pair, *pair_gradient)]
            for half, key_half, diagonal in list_causal_blocks(group.size(), rank=group.rank(), source=source):
                keys_values = _KeyValueHalf(*(part[key_half] for part in halves))
                _add_gradients(queries, half, keys_values, diagonal=diagonal)
            if transfer is not None:
                pair_gradient += transfer.wait()
            transfer = _RingTransfer.start(pair_gradient, group, tag=_GRADIENTS_TAG)
        assert transfer is not None
        key_gradient, value_gradient = transfer.wait().to(key.dtype)
        query_gradient = torch.cat(queries.query_gradient, dim=-2) * _softmax_scale(query)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, None


@dataclass(frozen=True, slots=True)
class _RingTransfer:
    """A tensor on its way to the next rank of the ring, and the one on its way here from the previous rank."""

    sent: Tensor  # referenced until the send has completed
    received: Tensor
    works: list[distributed.Work]

    @staticmethod
    def start(tensor: Tensor, group: ProcessGroup, *, tag: int) -> _RingTransfer:
        size, rank = group.size(), group.rank()
        received = torch.empty_like(tensor)
        send = distributed.P2POp(distributed.isend, tensor, group=group, tag=tag, group_peer=(rank + 1) % size)
        receive = distributed.P2POp(distributed.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % size)
        return _RingTransfer(tensor, received, distributed.batch_isend_irecv([send, receive]))

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _rotate_keys_values(pair: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's keys and values with its number, starting with this rank.

    They are sent on while the caller computes.
    """
    size, rank = group.size(), group.rank()
    for step in range(size):
        transfer = _RingTransfer.start(pair, group, tag=_KEYS_VALUES_TAG) if step < size - 1 else None
        yield (rank - step) % size, pair
        if transfer is not None:
            pair = transfer.wait()


class _QueryHalves(NamedTuple):
    """Tensors of this rank's queries that the backward pass needs, by half, and the sums of their gradients."""

    query: tuple[Tensor, ...]
    log_sum: tuple[Tensor, ...]
    gradient: tuple[Tensor, ...]
    offset: tuple[Tensor, ...]  # sum over the head size of gradient x output, from the derivative of the softmax
    query_gradient: tuple[Tensor, ...]

    @staticmethod
    def from_forward(query: Tensor, output: Tensor, log_sum: Tensor, gradient: Tensor) -> _QueryHalves:
        queries = _scale_queries(query)
        gradient = gradient.to(queries.dtype)
        offset = (gradient * output).sum(-1, keepdim=True)
        return _QueryHalves(*map(_split_halves, (queries, log_sum, gradient, offset, torch.zeros_like(queries))))


class _KeyValueHalf(NamedTuple):
    """Half the keys and values of one rank, and the sums of their gradients."""

    key: Tensor
    value: Tensor
    key_gradient: Tensor
    value_gradient: Tensor


def _add_gradients(queries: _QueryHalves, half: int, keys_values: _KeyValueHalf, *, diagonal: bool) -> None:
    query, log_sum, gradient, offset, query_gradient = (part[half] for part in queries)
    key, value = keys_values.key.to(query.dtype), keys_values.value.to(query.dtype)
    probabilities = _compute_scores(query, key, diagonal=diagonal).sub_(log_sum).exp_()
    keys_values.value_gradient.add_(probabilities.mT @ gradient)
    scores_gradient = (gradient @ value.mT).sub_(offset).mul_(probabilities)
    query_gradient.add_(scores_gradient @ key)
    keys_values.key_gradient.add_(scores_gradient.mT @ query)


def _merge_block(output: Tensor, log_sum: Tensor, scores: Tensor, value: Tensor) -> None:
    """Merge a block into the running output and the running logarithm of the softmax's sum, in place."""
    total = torch.logaddexp(log_sum, torch.logsumexp(scores, dim=-1, keepdim=True))
    output.mul_(torch.exp(log_sum - total)).add_(scores.sub_(total).exp_() @ value.to(scores.dtype))
    log_sum.copy_(total)


def _compute_scores(scaled_query: Tensor, key: Tensor, *, diagonal: bool) -> Tensor:
    scores = scaled_query @ key.to(scaled_query.dtype).mT
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _scale_queries(query: Tensor) -> Tensor:
    """Return the queries times 1 / sqrt(head size), in the dtype of the sums."""
    return query.to(torch.promote_types(query.dtype, torch.float32)) * _softmax_scale(query)


def _softmax_scale(query: Tensor) -> float:
    return 1 / math.sqrt(query.shape[-1])


def _split_halves(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return views of the first and the second half of the tokens of (..., tokens, size)."""
    return tensor.chunk(2, dim=-2)
