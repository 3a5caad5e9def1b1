"""The GPT: weights, causality and recomputation."""

import pytest
import torch
from torch.nn import functional

from scheduler.domain.parallel_plan import Recompute
from scheduler.trainer.model import SIZES, Block, GptSize, build_gpt, get_model_size

NANO = SIZES["nano-gpt"]


def _gradients(size: GptSize, recompute: Recompute) -> list[torch.Tensor]:
    model = build_gpt(size, seed=1, dtype=torch.float64)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.recompute = recompute
    tokens = torch.arange(2 * size.sequence).reshape(2, size.sequence) % size.vocabulary
    torch.autograd.backward(functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first, second, other = (build_gpt(NANO, seed=seed, dtype=torch.float32).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.project.weight"], other["head.project.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_part_of_the_model_starts_with_the_weights_of_the_whole_model() -> None:
    whole = build_gpt(NANO, seed=1, dtype=torch.float32).state_dict()
    parts = [build_gpt(NANO, seed=1, dtype=torch.float32, layers=layers) for layers in (range(2), range(2, 4))]
    states = [part.state_dict() for part in parts]
    assert sorted(whole) == sorted(name for state in states for name in state)
    assert all(torch.equal(whole[name], state[name]) for state in states for name in state)


def test_experts_start_different_from_each_other_with_zero_biases() -> None:
    torch.manual_seed(99)
    first, second, other = (
        build_gpt(SIZES["nano-moe"], seed=seed, dtype=torch.float32).state_dict() for seed in (1, 1, 2)
    )
    prefix = "blocks.1.feed_forward.experts"
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first[f"{prefix}.up"], other[f"{prefix}.up"])
    assert not torch.equal(first[f"{prefix}.up"][0], first[f"{prefix}.up"][1])
    assert not first[f"{prefix}.up_bias"].any()
    assert not first[f"{prefix}.down_bias"].any()
    # With two layers, weights that are added to the residual stream start half as large.
    assert first[f"{prefix}.down"].std() / first[f"{prefix}.up"].std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("name", ["nano-gpt", "nano-moe"])
def test_tokens_do_not_see_later_tokens(name: str) -> None:
    model = build_gpt(SIZES[name], seed=1, dtype=torch.float64)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 10] = 7
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    # Products over different numbers of rows may round differently.
    assert difference[:10].max() < 1e-14 < 1e-9 < difference[10:].min()


@pytest.mark.parametrize("name", ["nano-gpt", "nano-moe"])
@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL], ids="recompute-{}".format)
def test_recomputation_does_not_change_gradients(recompute: Recompute, name: str) -> None:
    without, with_recompute = _gradients(SIZES[name], Recompute.NONE), _gradients(SIZES[name], recompute)
    assert len(without) == len(with_recompute) > 20
    assert all(torch.equal(one, other) for one, other in zip(without, with_recompute, strict=True))


def test_unknown_model_is_rejected_with_the_known_names() -> None:
    known = "nano-gpt, tiny-gpt, mini-gpt, wide-gpt, nano-moe, mini-moe"
    with pytest.raises(ValueError, match=f"'gpt-9'.*{known}"):
        get_model_size("gpt-9")
