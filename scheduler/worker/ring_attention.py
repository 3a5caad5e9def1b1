"""Causal attention over a ring of ranks, each of which holds two chunks of the sequence.

Keys and values travel round the ring while every rank attends to what it holds, merged by an online softmax (Liu et
al., Ring Attention with Blockwise Transformers, arXiv 2310.01889). The chunks are dealt in zigzag order (USP, arXiv
2405.07719), so that under the causal mask no rank has more to compute than another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

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


def zigzag_chunks(ring: int, rank: int) -> tuple[int, int]:
    """Which two of the `2 x ring` equal chunks of a sequence a rank of the ring holds, the earlier first."""
    return rank, 2 * ring - 1 - rank


def causal_blocks(ring: int, *, rank: int, source: int) -> list[CausalBlock]:
    """What the causal mask leaves of the queries of `rank` against the keys of `source`.

    Three of four blocks against a rank's own keys, two against any other's, whichever ranks these are.
    """
    return [
        CausalBlock(query_half, key_half, diagonal=queries == keys)
        for query_half, queries in enumerate(zigzag_chunks(ring, rank))
        for key_half, keys in enumerate(zigzag_chunks(ring, source))
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
        queries = _scaled(query)
        output = torch.zeros_like(queries)
        log_sum = torch.full_like(queries[..., :1], -torch.inf)
        query_halves, output_halves, log_sum_halves = _halves(queries), _halves(output), _halves(log_sum)
        for source, pair in _round(torch.stack((key, value)), group):
            key_halves, value_halves = _halves(pair[0]), _halves(pair[1])
            for half, key_half, diagonal in causal_blocks(group.size(), rank=group.rank(), source=source):
                scores = _scores(query_halves[half], key_halves[key_half], diagonal=diagonal)
                _merge(output_halves[half], log_sum_halves[half], scores, value_halves[key_half])
        output = output.to(query.dtype)
        ctx.group = group
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, log_sum = ctx.saved_tensors
        group: ProcessGroup = ctx.group
        rows = _Rows.of(query, output, log_sum, gradient)
        arriving: _Passage | None = None
        for source, pair in _round(torch.stack((key, value)), group):
            # What this rank adds is computed while the sum of the ranks before it is on its way here.
            added = torch.zeros(pair.shape, dtype=rows.query[0].dtype, device=pair.device)
            halves = [_halves(part) for part in (*pair, *added)]
            for half, key_half, diagonal in causal_blocks(group.size(), rank=group.rank(), source=source):
                _add_gradients(rows, half, _Columns(*(part[key_half] for part in halves)), diagonal=diagonal)
            if arriving is not None:
                added += arriving.wait()
            arriving = _Passage.start(added, group, tag=_GRADIENTS_TAG)
        assert arriving is not None
        key_gradient, value_gradient = arriving.wait().to(key.dtype)
        query_gradient = torch.cat(rows.query_gradient, dim=-2) * _scale(query)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, None


@dataclass(frozen=True, slots=True)
class _Passage:
    """A tensor on its way to the next rank of the ring, and its like on its way here from the one before."""

    # Held until it has left.
    sent: Tensor
    received: Tensor
    works: list[distributed.Work]

    @staticmethod
    def start(tensor: Tensor, group: ProcessGroup, *, tag: int) -> _Passage:
        size, rank = group.size(), group.rank()
        received = torch.empty_like(tensor)
        send = distributed.P2POp(distributed.isend, tensor, group=group, tag=tag, group_peer=(rank + 1) % size)
        receive = distributed.P2POp(distributed.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % size)
        return _Passage(tensor, received, distributed.batch_isend_irecv([send, receive]))

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _round(pair: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Whose keys and values, and these: the own first, then each other rank's; sent on while the caller computes."""
    size, rank = group.size(), group.rank()
    for step in range(size):
        arriving = _Passage.start(pair, group, tag=_KEYS_VALUES_TAG) if step < size - 1 else None
        yield (rank - step) % size, pair
        if arriving is not None:
            pair = arriving.wait()


class _Rows(NamedTuple):
    """By half: what backward needs of the queries of this rank, and the sum of their gradients."""

    query: tuple[Tensor, ...]
    log_sum: tuple[Tensor, ...]
    gradient: tuple[Tensor, ...]
    # Sum over the head of gradient x output: what the softmax's derivative takes off each row.
    offset: tuple[Tensor, ...]
    query_gradient: tuple[Tensor, ...]

    @staticmethod
    def of(query: Tensor, output: Tensor, log_sum: Tensor, gradient: Tensor) -> _Rows:
        queries = _scaled(query)
        widened = gradient.to(queries.dtype)
        offset = (widened * output).sum(-1, keepdim=True)
        return _Rows(*map(_halves, (queries, log_sum, widened, offset, torch.zeros_like(queries))))


class _Columns(NamedTuple):
    """Half the keys and values of one rank, and where their gradients are summed."""

    key: Tensor
    value: Tensor
    key_gradient: Tensor
    value_gradient: Tensor


def _add_gradients(rows: _Rows, half: int, columns: _Columns, *, diagonal: bool) -> None:
    query, log_sum, gradient, offset, query_gradient = (part[half] for part in rows)
    key, value = columns.key.to(query.dtype), columns.value.to(query.dtype)
    probabilities = _scores(query, key, diagonal=diagonal).sub_(log_sum).exp_()
    columns.value_gradient.add_(probabilities.mT @ gradient)
    scores_gradient = (gradient @ value.mT).sub_(offset).mul_(probabilities)
    query_gradient.add_(scores_gradient @ key)
    columns.key_gradient.add_(scores_gradient.mT @ query)


def _merge(output: Tensor, log_sum: Tensor, scores: Tensor, value: Tensor) -> None:
    """Takes a block into the running output and the running logarithm of the softmax's sum, both in place."""
    total = torch.logaddexp(log_sum, torch.logsumexp(scores, dim=-1, keepdim=True))
    output.mul_(torch.exp(log_sum - total)).add_(scores.sub_(total).exp_() @ value.to(scores.dtype))
    log_sum.copy_(total)


def _scores(scaled_query: Tensor, key: Tensor, *, diagonal: bool) -> Tensor:
    scores = scaled_query @ key.to(scaled_query.dtype).mT
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _scaled(query: Tensor) -> Tensor:
    """Queries times 1 / sqrt(head size), in the precision in which sums are kept."""
    return query.to(torch.promote_types(query.dtype, torch.float32)) * _scale(query)


def _scale(query: Tensor) -> float:
    return 1 / math.sqrt(query.shape[-1])


def _halves(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of (..., the first half of the tokens, size) and of the second."""
    return tensor.chunk(2, dim=-2)
