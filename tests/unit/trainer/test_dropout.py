"""Dropout masks: equal on copies of a token, and unchanged by the layout and by recomputation."""

from __future__ import annotations

import pytest
import torch

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.trainer.activation_sharding import compute_token_shardings
from scheduler.trainer.dropout import MicroBatchTokens, SequenceTokens, TokenDropout
from scheduler.trainer.layout import build_layout
from scheduler.trainer.model import SIZES, Block, build_gpt
from tests.unit.trainer.test_layout import plan_of

SIZE = SIZES["nano-gpt"]
SAMPLES, HIDDEN = 12, 8
DROPOUT = TokenDropout(0.3, key=5)
L = LayerStrategy


def _whole_mask(samples: range) -> torch.Tensor:
    numbers = torch.tensor(samples)[:, None] * SIZE.sequence + torch.arange(SIZE.sequence)
    return DROPOUT(torch.ones(len(samples), SIZE.sequence, HIDDEN), numbers).flatten(0, 1)


@pytest.mark.parametrize(
    ("strategy", "micro_batches"),
    [
        (L(2, dp=4), 1),
        (L(2, tp=2, dp=2), 3),
        (L(2, tp=4, sequence_sharding=True), 2),
        (L(2, ulysses=2, ring=2), 1),
    ],
)
def test_each_rank_has_its_part_of_one_mask(strategy: LayerStrategy, micro_batches: int) -> None:
    plan = plan_of((strategy,), micro_batches=micro_batches, micro_batch_size=SAMPLES // micro_batches)
    layout = build_layout(plan, world_size=4, block_count=SIZE.layers)
    shardings = compute_token_shardings(layout, SIZE.sequence)
    first_sample = 24
    whole = _whole_mask(range(first_sample, first_sample + SAMPLES))
    for rank in range(4):
        tokens = MicroBatchTokens(range(4), layout, shardings, rank=rank, sequence=SIZE.sequence, device="cpu")
        tokens.begin_step(first_sample)
        for number in range(micro_batches):
            own = tokens.begin_pass()[1]
            part = DROPOUT(torch.ones(*own.shape, HIDDEN), own)
            offset = number * layout.micro_batch_size * SIZE.sequence
            assert torch.equal(part.flatten(0, 1), whole[offset + shardings[1].token_indices[rank]])


def test_kept_elements_are_scaled_up_and_no_step_repeats_a_mask() -> None:
    first, second = _whole_mask(range(12)), _whole_mask(range(12, 24))
    assert sorted(set(first.flatten().tolist())) == pytest.approx([0.0, 1 / 0.7])
    assert first.mean().item() == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(first, second)


def test_without_a_probability_or_in_evaluation_all_elements_are_kept() -> None:
    values = torch.ones(1, 4, HIDDEN)
    assert torch.equal(TokenDropout()(values, torch.arange(4)[None]), values)
    model = build_gpt(SIZE, seed=1, dtype=torch.float64)
    model.token_numbers = SequenceTokens(model.layer_range, torch.arange(SIZE.sequence))
    assert model.embedding is not None
    tokens = torch.arange(SIZE.sequence)[None]
    plain = model(tokens)
    model.embedding.dropout = DROPOUT
    assert not torch.equal(model(tokens), plain)
    assert torch.equal(model.eval()(tokens), plain)


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL], ids="recompute-{}".format)
def test_recomputation_repeats_the_masks(recompute: Recompute) -> None:
    gradients = []
    for each in (Recompute.NONE, recompute):
        model = build_gpt(SIZE, seed=1, dtype=torch.float64)
        model.token_numbers = SequenceTokens(model.layer_range, torch.arange(SIZE.sequence))
        for block in model.blocks.values():
            assert isinstance(block, Block)
            block.recompute, block.attention_dropout, block.feed_forward_dropout = each, DROPOUT, DROPOUT
        torch.autograd.backward(model(torch.arange(SIZE.sequence)[None]).square().sum())
        gradients.append([parameter.grad for parameter in model.parameters()])
    pairs = zip(*gradients, strict=True)
    assert all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)
