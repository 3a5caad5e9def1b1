"""Which cells of a micro-batch each rank works on, layer by layer, and how stages hand them over.

A cell is one token of one sample. Micro-batches are those of the plan: all stages cut them into the same cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.worker.context_attention import token_positions
from scheduler.worker.layout import Layout, place
from scheduler.worker.relayout import Spread


def spreads_of(layout: Layout, tokens: int) -> tuple[Spread, ...]:
    """Of each layer, over the ranks of its group; one and the same where neighbours of one group are alike."""
    known: dict[tuple[int, ...], Spread] = {}
    found = []
    for number, one in enumerate(layout.layers):
        # Embedding and head have whole sequences on each tensor-parallel rank: their own split is by vocabulary.
        by_tokens = one.sequence_sharding and 0 < number < len(layout.layers) - 1
        key = (one.tp, one.dp, one.ulysses, one.ring, by_tokens)
        if key not in known:
            known[key] = _spread_cells(layout, one, tokens, by_tokens=by_tokens)
        found.append(known[key])
    return tuple(found)


def borders(held: range, layout: Layout, spreads: Sequence[Spread]) -> Iterator[tuple[int, Spread, Spread]]:
    """In front of which layer of a stage, and behind its last one, the cells go from which spread to which."""
    stage = layout.stages.index(held)
    if stage > 0:
        yield held.start, hand_over(layout, spreads, stage - 1)[1], spreads[held.start]
    yield from ((number, spreads[number - 1], spreads[number]) for number in held[1:])
    if stage < len(layout.stages) - 1:
        yield held.stop, spreads[held.stop - 1], hand_over(layout, spreads, stage)[0]


def _spread_cells(layout: Layout, strategy: LayerStrategy, tokens: int, *, by_tokens: bool) -> Spread:
    cells, samples = [], range(0)
    for rank in range(strategy.gpus):
        here, samples = place(strategy, rank), layout.samples(strategy, rank)
        places = token_positions(
            tokens=tokens, ulysses=strategy.ulysses, ring=strategy.ring, index=here.context(strategy)
        )
        if by_tokens:
            places = places.chunk(strategy.tp)[here.tp]
        cells.append((torch.tensor(samples)[:, None] * tokens + places[None, :]).flatten())
    return Spread(tuple(cells), len(samples), copies=1 if by_tokens else strategy.tp)


def hand_over(layout: Layout, spreads: Sequence[Spread], stage: int) -> tuple[Spread, Spread]:
    """How a micro-batch lies on the ranks of `stage` when it leaves for the next one, and on theirs when it arrives.

    Each rank sends to the one with its number in the next group. Groups of equal width hand over what the receiver
    works on. Of others the narrower one's ranks have equal shares of the cells, and so have as many of the wider one's.
    """
    begin = layout.stages[stage + 1].start
    here, there = len(spreads[begin - 1].cells), len(spreads[begin].cells)
    if here == there:
        return spreads[begin], spreads[begin]
    cells = spreads[begin].holders.shape[1]
    parts = torch.arange(cells).tensor_split(min(here, there))
    return _shares(parts, here), _shares(parts, there)


def _shares(parts: Sequence[torch.Tensor], ranks: int) -> Spread:
    nothing = torch.empty(0, dtype=torch.int64)
    return Spread((*parts, *[nothing] * (ranks - len(parts))), samples=1, copies=1)
