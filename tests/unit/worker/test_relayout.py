"""Routes between spreads, followed by hand: what each rank sends and where it lands is what an all-to-all does."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.worker.layout import layout
from scheduler.worker.relayout import Spread, route
from scheduler.worker.spreads import hand_over, spreads_of
from tests.unit.worker.test_layout import layout_of, plan_of

TOKENS = 16
FOUR_RANKS = [
    LayerStrategy(1, dp=4),
    LayerStrategy(1, tp=4),
    LayerStrategy(1, tp=4, sequence_sharding=True),
    LayerStrategy(1, tp=2, dp=2),
    LayerStrategy(1, tp=2, ulysses=2, sequence_sharding=True),
    LayerStrategy(1, ring=2, dp=2),
    LayerStrategy(1, ring=2, ulysses=2),
    LayerStrategy(1, ulysses=4),
]


def spread_of(strategy: LayerStrategy) -> Spread:
    middle = layout_of(strategy, blocks=1)
    return spreads_of(middle, TOKENS)[1]


def carried(have: Spread, want: Spread) -> list[torch.Tensor]:
    """Each rank's cells after the exchange, where each held its own before."""
    ranks = range(len(have.cells))
    routes = [route(have, want, rank=rank) for rank in ranks]
    sent = [torch.split(have.cells[rank][routes[rank].send], routes[rank].send_counts) for rank in ranks]
    arrived = []
    for rank in ranks:
        got = torch.cat([sent[other][rank] for other in ranks])
        assert [len(sent[other][rank]) for other in ranks] == routes[rank].receive_counts
        outputs = torch.empty_like(got)
        outputs[routes[rank].receive] = got
        arrived.append(outputs)
    return arrived


@given(st.sampled_from(FOUR_RANKS), st.sampled_from(FOUR_RANKS))
def test_every_rank_gets_its_cells_in_its_order(before: LayerStrategy, after: LayerStrategy) -> None:
    have, want = spread_of(before), spread_of(after)
    for got, wanted in zip(carried(have, want), want.cells, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("strategy", FOUR_RANKS, ids=str)
def test_all_ranks_together_hold_each_cell_as_often_as_there_are_copies(strategy: LayerStrategy) -> None:
    spread = spread_of(strategy)
    held = torch.cat(spread.cells).bincount()
    assert len(held) == 12 * TOKENS
    assert (held == spread.copies).all()
    assert all(prod(spread.shape(rank)) == len(cells) for rank, cells in enumerate(spread.cells))


STAGES = [
    LayerStrategy(1),
    LayerStrategy(1, dp=2),
    LayerStrategy(1, dp=3),
    LayerStrategy(1, tp=2, dp=2),
    LayerStrategy(1, ring=2, tp=2, sequence_sharding=True),
]


@given(st.sampled_from(STAGES), st.sampled_from(STAGES))
def test_stages_of_any_two_widths_hand_each_cell_over_once(before: LayerStrategy, after: LayerStrategy) -> None:
    made = layout(plan_of((before,), (after,)), world_size=before.gpus + after.gpus, blocks=2)
    spreads = spreads_of(made, TOKENS)
    leaving, arriving = hand_over(made, spreads, 0)
    assert (len(leaving.cells), len(arriving.cells)) == (before.gpus, after.gpus)
    pairs = list(zip(leaving.cells, arriving.cells, strict=False))
    assert all(torch.equal(sent, received) for sent, received in pairs)
    assert not any(len(rest) for rest in (*leaving.cells[len(pairs) :], *arriving.cells[len(pairs) :]))
    if before.gpus != after.gpus:
        assert torch.cat([sent for sent, _ in pairs]).tolist() == list(range(12 * TOKENS))
    for have, want in ((spreads[1], leaving), (arriving, spreads[2])):
        for got, wanted in zip(carried(have, want), want.cells, strict=True):
            assert torch.equal(got, wanted)
