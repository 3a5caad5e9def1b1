"""Relayout: hands activations from ranks that work on one part of a micro-batch each to ranks that work on another.

Neighbouring layers may follow unlike strategies: one with tensor parallelism over half of the batch, the next with data
parallelism over a quarter. A cell is one token of one sample. Each rank of a pipeline group knows which cells it has
and which it needs, so that one all-to-all moves every missing cell once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Spread:
    """The cells of one micro-batch by rank of the group: `cells[rank]`, 1-D int64, in the order in which the rank holds
    them; of the ranks that hold a cell, `copies` consecutive ones hold equal copies of all their cells."""

    cells: tuple[Tensor, ...]
    samples: int
    """Of each rank's part, which has as many tokens of each."""
    copies: int

    def shape(self, rank: int) -> tuple[int, int]:
        """Samples and tokens of the part of a rank."""
        return self.samples, len(self.cells[rank]) // self.samples

    @cached_property
    def holders(self) -> Tensor:
        """Shape (copies, cells, 2): the rank that has each copy of each cell, and where in its part."""
        found = torch.empty(self.copies, sum(map(len, self.cells)) // self.copies, 2, dtype=torch.int64)
        for rank, held in enumerate(self.cells):
            found[rank % self.copies, held, 0] = rank
            found[rank % self.copies, held, 1] = torch.arange(len(held))
        return found


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """What one rank sends and receives to come from one spread to another."""

    send: Tensor
    send_counts: list[int]
    receive: Tensor
    receive_counts: list[int]
    shape: tuple[int, int]


def route(have: Spread, want: Spread, *, rank: int) -> Route:
    """Every rank takes a cell from the copy with its own number, so that copies share the work."""
    sources = [have.holders[other % have.copies, cells] for other, cells in enumerate(want.cells)]
    sends = [source[source[:, 0] == rank, 1] for source in sources]
    receives = [torch.nonzero(sources[rank][:, 0] == other).flatten() for other in range(len(have.cells))]
    return Route(torch.cat(sends), _lengths(sends), torch.cat(receives), _lengths(receives), want.shape(rank))


class Relayout:
    """A callable on activations of shape (samples, tokens, hidden), differentiable.

    Gradients travel the same way back. A copy's gradient is the whole one, as tensor-parallel layers give it.
    """

    def __init__(self, have: Spread, want: Spread, *, rank: int, group: dist.ProcessGroup) -> None:
        self._there = route(have, want, rank=rank)
        self._back = route(want, have, rank=rank)
        self._group = group

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _Move.apply(inputs, self._there, self._back, self._group)  # type: ignore[no-untyped-call]  # torch's
        return outputs


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, there: Route, back: Route, group: dist.ProcessGroup) -> Tensor:
        ctx.back, ctx.there, ctx.group = back, there, group
        return _move(inputs, there, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _move(gradients[0], ctx.back, ctx.group), None, None, None


def _move(inputs: Tensor, route: Route, group: dist.ProcessGroup) -> Tensor:
    rows = inputs.flatten(0, 1)
    sent = rows[route.send.to(inputs.device)].contiguous()
    got = inputs.new_empty(len(route.receive), inputs.shape[-1])
    dist.all_to_all_single(got, sent, route.receive_counts, route.send_counts, group=group)
    outputs = torch.empty_like(got)
    outputs[route.receive.to(inputs.device)] = got
    return outputs.view(*route.shape, inputs.shape[-1])


def _lengths(parts: Sequence[Tensor]) -> list[int]:
    return [len(part) for part in parts]
