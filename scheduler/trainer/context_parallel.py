"""Causal attention over a sequence that is split over ranks: Ulysses inside, a ring across (USP, arXiv 2405.07719).

The ranks of a Ulysses group trade tokens for heads before attention and back after it (DeepSpeed-Ulysses, arXiv
2309.14509): in between each has all tokens of its group for a part of the heads. The groups stand in a ring.

Causal attention over a ring of ranks, each of which holds two chunks of the sequence.

Keys and values travel round the ring while every rank attends to what it holds, merged by an online softmax (Liu et
al., Ring Attention with Blockwise Transformers, arXiv 2310.01889). The chunks are dealt in zigzag order (USP, arXiv
2405.07719), so that under the causal mask no rank has more to compute than another.
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

# Of (..., heads, tokens, head size), so that queries, keys and values may also travel stacked.
_HEAD_DIM = -3
_TOKEN_DIM = -2


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """The groups of one rank, None for a dimension of one rank.

    A rank's context index is `ring rank x ulysses size + ulysses rank`: the order of a mesh ("ring", "ulysses").
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
    """Which tokens of a sequence the rank of context index `index` holds, in its order: 1-D, int64, on the CPU.

    Zigzag over the ring; inside a ring rank the Ulysses ranks hold equal contiguous parts of its two chunks in a row.

    Raises:
        ValueError: the sequence cannot be split like this, or there is no such index.
    """
    if not 0 <= index < ulysses * ring:
        raise ValueError(f"index is {index}, ulysses {ulysses} x ring {ring} has 0 to {ulysses * ring - 1}")
    # A ring rank holds two equal chunks, and as many tokens for each of its Ulysses ranks.
    multiple = ring * lcm(2, ulysses) if ring > 1 else ulysses
    if tokens < 1 or tokens % multiple:
        raise ValueError(
            f"sequence is {tokens} tokens, it must be a multiple of {multiple} for ulysses {ulysses} x ring {ring}"
        )
    held = torch.arange(tokens)
    if ring > 1:
        chunks = held.chunk(2 * ring)
        held = torch.cat([chunks[chunk] for chunk in assign_zigzag_chunks(ring, index // ulysses)])
    return held.chunk(ulysses)[index % ulysses]


def context_attention(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> Tensor:
    """Attention, causal over the whole sequence, of the tokens that `token_positions` gives to this rank.

    Each is (samples, heads, local tokens, head size), and so is the result. Collective over both groups.

    Raises:
        ValueError: the shapes differ, the heads are no multiple of the Ulysses ranks, or a ring rank has an odd number
            of tokens.
    """
    _validate_shapes(query, key, value, groups)
    if groups.ulysses is None or groups.ulysses_size == 1:
        return _attend_over_ring(query, key, value, groups)
    # In one message rather than three.
    exchanged = _exchange_dimensions(torch.stack((query, key, value)), groups.ulysses, split=_HEAD_DIM, join=_TOKEN_DIM)
    query, key, value = exchanged.unbind()
    mixed = _attend_over_ring(query, key, value, groups)
    return _exchange_dimensions(mixed, groups.ulysses, split=_TOKEN_DIM, join=_HEAD_DIM)


def _validate_shapes(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> None:
    if not query.shape == key.shape == value.shape:
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        raise ValueError(f"query, key and value have shapes {shapes}, they must be equal")
    heads, tokens = query.shape[_HEAD_DIM], query.shape[_TOKEN_DIM]
    if heads % groups.ulysses_size:
        raise ValueError(f"there are {heads} heads, they must be a multiple of ulysses {groups.ulysses_size}")
    if groups.ring_size > 1 and tokens * groups.ulysses_size % 2:
        raise ValueError(
            f"a rank of ring {groups.ring_size} has {tokens} x ulysses {groups.ulysses_size} tokens, "
            "it must have an even number: two chunks of the sequence"
        )


def _attend_over_ring(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> Tensor:
    """Attention of some heads, given all tokens of this rank's Ulysses group."""
    if groups.ring is None or groups.ring_size == 1:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return ring_attention(query, key, value, groups.ring)


def _exchange_dimensions(tensor: Tensor, group: ProcessGroup, *, split: int, join: int) -> Tensor:
    exchanged: Tensor = _DimensionExchange.apply(tensor, group, split, join)  # type: ignore[no-untyped-call]  # torch's is untyped
    return exchanged


class _DimensionExchange(torch.autograd.Function):
    """Each rank gives the others their part of dimension `split` and joins what it gets along `join`, in rank order."""

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


# Both may be under way between the same two ranks at once.
_KEYS_VALUES_TAG = 0
_GRADIENTS_TAG = 1


class CausalBlock(NamedTuple):
    """Half the queries of one rank against half the keys of another; half 0 is the earlier chunk of the two.

    `diagonal`: both are the same chunk, so that the mask cuts through the block; in others every query sees every key.
    """

    query_half: int
    key_half: int
    diagonal: bool


def assign_zigzag_chunks(ring: int, rank: int) -> tuple[int, int]:
    """Which two of the `2 x ring` equal chunks of a sequence a rank of the ring holds, the earlier first."""
    return rank, 2 * ring - 1 - rank


def list_causal_blocks(ring: int, *, rank: int, source: int) -> list[CausalBlock]:
    """What the causal mask leaves of the queries of `rank` against the keys of `source`.

    Three of four blocks against a rank's own keys, two against any other's, whichever ranks these are.
    """
    return [
        CausalBlock(query_half, key_half, diagonal=queries == keys)
        for query_half, queries in enumerate(assign_zigzag_chunks(ring, rank))
        for key_half, keys in enumerate(assign_zigzag_chunks(ring, source))
        if keys <= queries
    ]


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> Tensor:
    """Causal attention; collective over `group`, whose rank r holds the chunks `zigzag_chunks(size, r)`.

    Each is (samples, heads, an even number of tokens, head size). Sums are kept in float32, or float64 for float64.
    """
    output: Tensor = _RingAttention.apply(query, key, value, group)  # type: ignore[no-untyped-call]  # torch's is untyped
    return output


class _RingAttention(torch.autograd.Function):
    """Keeps the logarithm of the softmax's sum alone: backward computes the probabilities again, block by block.

    After FlashAttention-2 (arXiv 2307.08691, section 3.1). The gradients of keys and values travel round the ring
    behind these, and come home after the last step.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> Tensor:
        queries = _scale_queries(query)
        output = torch.zeros_like(queries)
        log_sum = torch.full_like(queries[..., :1], -torch.inf)
        query_halves, output_halves, log_sum_halves = (
            _split_halves(queries),
            _split_halves(output),
            _split_halves(log_sum),
        )
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
        rows = _QueryHalves.from_forward(query, output, log_sum, gradient)
        arriving: _RingTransfer | None = None
        for source, pair in _rotate_keys_values(torch.stack((key, value)), group):
            # What this rank adds is computed while the sum of the ranks before it is on its way here.
            added = torch.zeros(pair.shape, dtype=rows.query[0].dtype, device=pair.device)
            halves = [_split_halves(part) for part in (*pair, *added)]
            for half, key_half, diagonal in list_causal_blocks(group.size(), rank=group.rank(), source=source):
                _add_gradients(rows, half, _KeyValueHalf(*(part[key_half] for part in halves)), diagonal=diagonal)
            if arriving is not None:
                added += arriving.wait()
            arriving = _RingTransfer.start(added, group, tag=_GRADIENTS_TAG)
        assert arriving is not None
        key_gradient, value_gradient = arriving.wait().to(key.dtype)
        query_gradient = torch.cat(rows.query_gradient, dim=-2) * _softmax_scale(query)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, None


@dataclass(frozen=True, slots=True)
class _RingTransfer:
    """A tensor on its way to the next rank of the ring, and its like on its way here from the one before."""

    # Held until it has left.
    sent: Tensor
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
    """Whose keys and values, and these: the own first, then each other rank's; sent on while the caller computes."""
    size, rank = group.size(), group.rank()
    for step in range(size):
        arriving = _RingTransfer.start(pair, group, tag=_KEYS_VALUES_TAG) if step < size - 1 else None
        yield (rank - step) % size, pair
        if arriving is not None:
            pair = arriving.wait()


class _QueryHalves(NamedTuple):
    """By half: what backward needs of the queries of this rank, and the sum of their gradients."""

    query: tuple[Tensor, ...]
    log_sum: tuple[Tensor, ...]
    gradient: tuple[Tensor, ...]
    # Sum over the head of gradient x output: what the softmax's derivative takes off each row.
    offset: tuple[Tensor, ...]
    query_gradient: tuple[Tensor, ...]

    @staticmethod
    def from_forward(query: Tensor, output: Tensor, log_sum: Tensor, gradient: Tensor) -> _QueryHalves:
        queries = _scale_queries(query)
        widened = gradient.to(queries.dtype)
        offset = (widened * output).sum(-1, keepdim=True)
        return _QueryHalves(*map(_split_halves, (queries, log_sum, widened, offset, torch.zeros_like(queries))))


class _KeyValueHalf(NamedTuple):
    """Half the keys and values of one rank, and where their gradients are summed."""

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
    """Takes a block into the running output and the running logarithm of the softmax's sum, both in place."""
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
    """Queries times 1 / sqrt(head size), in the precision in which sums are kept."""
    return query.to(torch.promote_types(query.dtype, torch.float32)) * _softmax_scale(query)


def _softmax_scale(query: Tensor) -> float:
    return 1 / math.sqrt(query.shape[-1])


def _split_halves(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of (..., the first half of the tokens, size) and of the second."""
    return tensor.chunk(2, dim=-2)
