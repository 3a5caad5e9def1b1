"""Routes between spreads, followed by hand: what each rank sends and where it lands is what an all-to-all does."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.activation_sharding import (
    TokenSharding,
    compute_stage_handoff,
    compute_token_shardings,
    plan_route,
)
from scheduler.trainer.layout import build_layout
from tests.unit.trainer.test_layout import layout_of, plan_of

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


def spread_of(strategy: LayerStrategy) -> TokenSharding:
    middle = layout_of(strategy, blocks=1)
    return compute_token_shardings(middle, TOKENS)[1]


def carried(have: TokenSharding, want: TokenSharding) -> list[torch.Tensor]:
    """Each rank's cells after the exchange, where each held its own before."""
    ranks = range(len(have.token_indices))
    routes = [plan_route(have, want, rank=rank) for rank in ranks]
    sent = [torch.split(have.token_indices[rank][routes[rank].send], routes[rank].send_counts) for rank in ranks]
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
    for got, wanted in zip(carried(have, want), want.token_indices, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("strategy", FOUR_RANKS, ids=str)
def test_all_ranks_together_hold_each_cell_as_often_as_there_are_copies(strategy: LayerStrategy) -> None:
    spread = spread_of(strategy)
    held = torch.cat(spread.token_indices).bincount()
    assert len(held) == 12 * TOKENS
    assert (held == spread.copies).all()
    assert all(prod(spread.shape(rank)) == len(cells) for rank, cells in enumerate(spread.token_indices))


STAGES = [
    LayerStrategy(1),
    LayerStrategy(1, dp=2),
    LayerStrategy(1, dp=3),
    LayerStrategy(1, tp=2, dp=2),
    LayerStrategy(1, ring=2, tp=2, sequence_sharding=True),
]


@given(st.sampled_from(STAGES), st.sampled_from(STAGES))
def test_stages_of_any_two_widths_hand_each_cell_over_once(before: LayerStrategy, after: LayerStrategy) -> None:
    made = build_layout(plan_of((before,), (after,)), world_size=before.gpus + after.gpus, block_count=2)
    spreads = compute_token_shardings(made, TOKENS)
    leaving, arriving = compute_stage_handoff(made, spreads, 0)
    assert (len(leaving.token_indices), len(arriving.token_indices)) == (before.gpus, after.gpus)
    pairs = list(zip(leaving.token_indices, arriving.token_indices, strict=False))
    assert all(torch.equal(sent, received) for sent, received in pairs)
    assert not any(len(rest) for rest in (*leaving.token_indices[len(pairs) :], *arriving.token_indices[len(pairs) :]))
    if before.gpus != after.gpus:
        assert torch.cat([sent for sent, _ in pairs]).tolist() == list(range(12 * TOKENS))
    for have, want in ((spreads[1], leaving), (arriving, spreads[2])):
        for got, wanted in zip(carried(have, want), want.token_indices, strict=True):
            assert torch.equal(got, wanted)
