"""Token positions, causal blocks and validation of context parallelism; tests/e2e runs it on real ranks."""

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
def test_every_token_is_held_once_in_equal_parts(ulysses: int, ring: int, copies: int) -> None:
    tokens = 2 * ring * ulysses * copies
    held = [
        compute_token_positions(tokens=tokens, ulysses=ulysses, ring=ring, index=index)
        for index in range(ulysses * ring)
    ]
    assert {(part.dtype, tuple(part.shape)) for part in held} == {(torch.int64, (2 * copies,))}
    assert torch.cat(held).sort().values.tolist() == list(range(tokens))
    assert all((part.diff() > 0).all() for part in held)


def test_ulysses_ranks_hold_contiguous_parts_of_the_chunks_of_their_ring_rank() -> None:
    held = [compute_token_positions(tokens=24, ulysses=3, ring=2, index=index).tolist() for index in range(6)]
    assert held == [[0, 1, 2, 3], [4, 5, 18, 19], [20, 21, 22, 23], [6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17]]


def test_tokens_keep_their_order_without_a_ring() -> None:
    held = [compute_token_positions(tokens=9, ulysses=3, ring=1, index=index).tolist() for index in range(3)]
    assert held == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("tokens", "ulysses", "ring", "multiple"),
    [
        (130, 2, 2, 4),
        (10, 1, 2, 4),
        (12, 3, 4, 24),
        (7, 4, 1, 4),
        (0, 1, 1, 1),
    ],
)
def test_sequence_that_does_not_split_evenly_is_rejected(tokens: int, ulysses: int, ring: int, multiple: int) -> None:
    with pytest.raises(ValueError, match=f" {tokens} tokens.* multiple of {multiple} "):
        compute_token_positions(tokens=tokens, ulysses=ulysses, ring=ring, index=0)


@pytest.mark.parametrize("index", [-1, 6])
def test_index_out_of_range_is_rejected(index: int) -> None:
    with pytest.raises(ValueError, match=f"`index` is {index}.* 0 to 5"):
        compute_token_positions(tokens=12, ulysses=2, ring=3, index=index)


@pytest.mark.parametrize("ring", [2, 3, 4, 7])
def test_blocks_of_all_ranks_cover_the_causal_mask_once(ring: int) -> None:
    blocks = [
        (
            assign_zigzag_chunks(ring, rank)[block.query_half],
            assign_zigzag_chunks(ring, source)[block.key_half],
            block.diagonal,
        )
        for rank in range(ring)
        for source in range(ring)
        for block in list_causal_blocks(ring, rank=rank, source=source)
    ]
    assert sorted(blocks) == [(row, column, row == column) for row in range(2 * ring) for column in range(row + 1)]


@pytest.mark.parametrize("ring", [2, 3, 4, 7])
def test_all_ranks_have_equal_work_in_every_step_of_the_ring(ring: int) -> None:
    for step in range(ring):
        counts = {len(list_causal_blocks(ring, rank=rank, source=(rank - step) % ring)) for rank in range(ring)}
        assert counts == {3 if step == 0 else 2}


def test_without_groups_attention_is_plain_causal_attention() -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 5, generator=torch.Generator().manual_seed(0))
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(context_attention(query, key, value, ContextGroups(ulysses=None, ring=None)), expected)


def test_different_shapes_are_rejected() -> None:
    query, key = torch.zeros(1, 2, 8, 3), torch.zeros(1, 2, 6, 3)
    with pytest.raises(ValueError, match=re.escape("[(1, 2, 8, 3), (1, 2, 6, 3), (1, 2, 6, 3)]")):
        context_attention(query, key, key, ContextGroups(ulysses=None, ring=None))
