"""Routes between token shardings, simulated: what each rank sends and where it arrives."""

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


def sharding_of(strategy: LayerStrategy) -> TokenSharding:
    layout = layout_of(strategy, blocks=1)
    return compute_token_shardings(layout, TOKENS)[1]


def redistribute(current: TokenSharding, target: TokenSharding) -> list[torch.Tensor]:
    """Return the token indices of each rank after the exchange."""
    ranks = range(len(current.token_indices))
    routes = [plan_route(current, target, rank=rank) for rank in ranks]
    sent = [torch.split(current.token_indices[rank][routes[rank].send], routes[rank].send_counts) for rank in ranks]
    results = []
    for rank in ranks:
        received = torch.cat([sent[other][rank] for other in ranks])
        assert [len(sent[other][rank]) for other in ranks] == routes[rank].receive_counts
        outputs = torch.empty_like(received)
        outputs[routes[rank].receive] = received
        results.append(outputs)
    return results


@given(st.sampled_from(FOUR_RANKS), st.sampled_from(FOUR_RANKS))
def test_every_rank_receives_its_tokens_in_order(before: LayerStrategy, after: LayerStrategy) -> None:
    current, target = sharding_of(before), sharding_of(after)
    for tokens, expected in zip(redistribute(current, target), target.token_indices, strict=True):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("strategy", FOUR_RANKS, ids=str)
def test_ranks_hold_each_token_as_often_as_there_are_copies(strategy: LayerStrategy) -> None:
    sharding = sharding_of(strategy)
    counts = torch.cat(sharding.token_indices).bincount()
    assert len(counts) == 12 * TOKENS
    assert (counts == sharding.copies).all()
    assert all(prod(sharding.shape(rank)) == len(tokens) for rank, tokens in enumerate(sharding.token_indices))


STAGES = [
    LayerStrategy(1),
    LayerStrategy(1, dp=2),
    LayerStrategy(1, dp=3),
    LayerStrategy(1, tp=2, dp=2),
    LayerStrategy(1, ring=2, tp=2, sequence_sharding=True),
]


@given(st.sampled_from(STAGES), st.sampled_from(STAGES))
def test_stages_of_any_two_sizes_hand_over_each_token_once(before: LayerStrategy, after: LayerStrategy) -> None:
    layout = build_layout(plan_of((before,), (after,)), world_size=before.gpus + after.gpus, block_count=2)
    shardings = compute_token_shardings(layout, TOKENS)
    leaving, arriving = compute_stage_handoff(layout, shardings, 0)
    assert (len(leaving.token_indices), len(arriving.token_indices)) == (before.gpus, after.gpus)
    pairs = list(zip(leaving.token_indices, arriving.token_indices, strict=False))
    assert all(torch.equal(sent, received) for sent, received in pairs)
    assert not any(len(rest) for rest in (*leaving.token_indices[len(pairs) :], *arriving.token_indices[len(pairs) :]))
    if before.gpus != after.gpus:
        assert torch.cat([sent for sent, _ in pairs]).tolist() == list(range(12 * TOKENS))
    for current, target in ((shardings[1], leaving), (arriving, shardings[2])):
        for tokens, expected in zip(redistribute(current, target), target.token_indices, strict=True):
            assert torch.equal(tokens, expected)
