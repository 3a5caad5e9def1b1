import pytest
import torch
from torch.nn import functional

from scheduler.domain.parallel_plan import Recompute
from scheduler.worker.model import SIZES, Block, build_gpt, model_size

NANO = SIZES["nano-gpt"]


def _gradients(recompute: Recompute) -> list[torch.Tensor]:
    model = build_gpt(NANO, seed=1, dtype=torch.float64)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.recompute = recompute
    tokens = torch.arange(2 * NANO.sequence).reshape(2, NANO.sequence) % NANO.vocabulary
    torch.autograd.backward(functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_the_first_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first, second, other = (build_gpt(NANO, seed=seed, dtype=torch.float32).head.weight for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_no_token_sees_a_later_one() -> None:
    model = build_gpt(NANO, seed=1, dtype=torch.float64)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 10] = 7
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference[:10] == 0).all()
    assert (difference[10:] > 0).all()


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL], ids="recompute-{}".format)
def test_recomputation_changes_no_gradient(recompute: Recompute) -> None:
    plain, again = _gradients(Recompute.NONE), _gradients(recompute)
    assert len(plain) == len(again) > 20
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_a_model_outside_the_table_is_refused_with_the_names_in_it() -> None:
    with pytest.raises(ValueError, match="model is 'gpt-9', this trainer has nano-gpt, tiny-gpt, mini-gpt"):
        model_size("gpt-9")
