import re

import pytest
import torch
from torch.nn import functional

from scheduler.trainer.context_parallel import (
    ContextGroups,
    assign_zigzag_chunks,
    compute_token_positions,
    context_attention,
    list_causal_blocks,
)

SPLITS = [(ulysses, ring) for ulysses in (1, 2, 3, 4) for ring in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
@pytest.mark.parametrize("copies", [1, 3])
def test_every_token_is_held_once_and_every_rank_holds_as_many(ulysses: int, ring: int, copies: int) -> None:
    tokens = 2 * ring * ulysses * copies
    held = [
        compute_token_positions(tokens=tokens, ulysses=ulysses, ring=ring, index=index)
        for index in range(ulysses * ring)
    ]
    assert {(part.dtype, tuple(part.shape)) for part in held} == {(torch.int64, (2 * copies,))}
    assert torch.cat(held).sort().values.tolist() == list(range(tokens))
    assert all((part.diff() > 0).all() for part in held)


def test_ulysses_ranks_hold_neighbouring_parts_of_the_two_chunks_of_their_ring_rank() -> None:
    held = [compute_token_positions(tokens=24, ulysses=3, ring=2, index=index).tolist() for index in range(6)]
    assert held == [[0, 1, 2, 3], [4, 5, 18, 19], [20, 21, 22, 23], [6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17]]


def test_without_a_ring_the_tokens_stay_in_their_order() -> None:
    held = [compute_token_positions(tokens=9, ulysses=3, ring=1, index=index).tolist() for index in range(3)]
    assert held == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("tokens", "ulysses", "ring", "refusal"),
    [
        (130, 2, 2, "sequence is 130 tokens, it must be a multiple of 4 for ulysses 2 x ring 2"),
        (10, 1, 2, "sequence is 10 tokens, it must be a multiple of 4 for ulysses 1 x ring 2"),
        (12, 3, 4, "sequence is 12 tokens, it must be a multiple of 24 for ulysses 3 x ring 4"),
        (7, 4, 1, "sequence is 7 tokens, it must be a multiple of 4 for ulysses 4 x ring 1"),
        (0, 1, 1, "sequence is 0 tokens, it must be a multiple of 1 for ulysses 1 x ring 1"),
    ],
)
def test_a_sequence_that_does_not_split_evenly_is_refused(tokens: int, ulysses: int, ring: int, refusal: str) -> None:
    with pytest.raises(ValueError, match=re.escape(refusal)):
        compute_token_positions(tokens=tokens, ulysses=ulysses, ring=ring, index=0)


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_beyond_the_ranks_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"index is {index}, ulysses 2 x ring 3 has 0 to 5"):
        compute_token_positions(tokens=12, ulysses=2, ring=3, index=index)


@pytest.mark.parametrize("ring", [2, 3, 4, 7])
def test_the_blocks_of_all_ranks_are_what_the_causal_mask_leaves_each_once(ring: int) -> None:
    computed = [
        (
            assign_zigzag_chunks(ring, rank)[block.query_half],
            assign_zigzag_chunks(ring, source)[block.key_half],
            block.diagonal,
        )
        for rank in range(ring)
        for source in range(ring)
        for block in list_causal_blocks(ring, rank=rank, source=source)
    ]
    assert sorted(computed) == [(row, column, row == column) for row in range(2 * ring) for column in range(row + 1)]


@pytest.mark.parametrize("ring", [2, 3, 4, 7])
def test_in_every_step_of_the_ring_all_ranks_compute_as_much(ring: int) -> None:
    for step in range(ring):
        counts = {len(list_causal_blocks(ring, rank=rank, source=(rank - step) % ring)) for rank in range(ring)}
        assert counts == {3 if step == 0 else 2}


def test_without_groups_it_is_plain_causal_attention() -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 5, generator=torch.Generator().manual_seed(0))
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(context_attention(query, key, value, ContextGroups(ulysses=None, ring=None)), expected)


def test_keys_of_another_shape_are_refused() -> None:
    query, key = torch.zeros(1, 2, 8, 3), torch.zeros(1, 2, 6, 3)
    with pytest.raises(ValueError, match=re.escape("have shapes [(1, 2, 8, 3), (1, 2, 6, 3), (1, 2, 6, 3)]")):
        context_attention(query, key, key, ContextGroups(ulysses=None, ring=None))
