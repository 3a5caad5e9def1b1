"""Causal attention over a sequence that is split over ranks: Ulysses inside, a ring across (USP, arXiv 2405.07719).

The ranks of a Ulysses group trade tokens for heads before attention and back after it (DeepSpeed-Ulysses, arXiv
2309.14509): in between each has all tokens of its group for a part of the heads. The groups stand in a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from scheduler.worker.ring_attention import ring_attention, zigzag_chunks

# Of (..., heads, tokens, head size), so that queries, keys and values may also travel stacked.
_HEADS = -3
_TOKENS = -2


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


def token_positions(*, tokens: int, ulysses: int, ring: int, index: int) -> Tensor:
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
        held = torch.cat([chunks[chunk] for chunk in zigzag_chunks(ring, index // ulysses)])
    return held.chunk(ulysses)[index % ulysses]


def context_attention(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> Tensor:
    """Attention, causal over the whole sequence, of the tokens that `token_positions` gives to this rank.

    Each is (samples, heads, local tokens, head size), and so is the result. Collective over both groups.

    Raises:
        ValueError: the shapes differ, the heads are no multiple of the Ulysses ranks, or a ring rank has an odd number
            of tokens.
    """
    _check(query, key, value, groups)
    if groups.ulysses is None or groups.ulysses_size == 1:
        return _across(query, key, value, groups)
    # In one message rather than three.
    exchanged = _exchange(torch.stack((query, key, value)), groups.ulysses, split=_HEADS, join=_TOKENS)
    query, key, value = exchanged.unbind()
    mixed = _across(query, key, value, groups)
    return _exchange(mixed, groups.ulysses, split=_TOKENS, join=_HEADS)


def _check(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> None:
    if not query.shape == key.shape == value.shape:
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        raise ValueError(f"query, key and value have shapes {shapes}, they must be equal")
    heads, tokens = query.shape[_HEADS], query.shape[_TOKENS]
    if heads % groups.ulysses_size:
        raise ValueError(f"there are {heads} heads, they must be a multiple of ulysses {groups.ulysses_size}")
    if groups.ring_size > 1 and tokens * groups.ulysses_size % 2:
        raise ValueError(
            f"a rank of ring {groups.ring_size} has {tokens} x ulysses {groups.ulysses_size} tokens, "
            "it must have an even number: two chunks of the sequence"
        )


def _across(query: Tensor, key: Tensor, value: Tensor, groups: ContextGroups) -> Tensor:
    """Attention of some heads, given all tokens of this rank's Ulysses group."""
    if groups.ring is None or groups.ring_size == 1:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return ring_attention(query, key, value, groups.ring)


def _exchange(tensor: Tensor, group: ProcessGroup, *, split: int, join: int) -> Tensor:
    exchanged: Tensor = _Exchange.apply(tensor, group, split, join)  # type: ignore[no-untyped-call]  # torch's is untyped
    return exchanged


class _Exchange(torch.autograd.Function):
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
