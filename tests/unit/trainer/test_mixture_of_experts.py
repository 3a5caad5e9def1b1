"""The mixture of experts on one rank."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from scheduler.trainer.mixture_of_experts import MixtureOfExperts, shard_experts

HIDDEN, EXPERTS = 8, 5


def _mixture(experts_per_token: int, *, seed: int = 0) -> MixtureOfExperts:
    """Return a float64 module whose weights and biases are large enough to matter."""
    module = MixtureOfExperts(hidden=HIDDEN, experts=EXPERTS, experts_per_token=experts_per_token).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def _inputs(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.rand(*shape, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()


def _run_token_by_token(module: MixtureOfExperts, inputs: Tensor) -> Tensor:
    """Compute the same outputs in a loop over tokens."""
    experts = module.experts
    outputs = []
    for token in inputs.reshape(-1, HIDDEN):
        logits = module.router.weight @ token
        chosen = sorted(range(EXPERTS), key=lambda expert: -logits[expert].item())[: module.experts_per_token]
        total = torch.stack([logits[expert].exp() for expert in chosen]).sum()
        output = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert in chosen:
            inner = functional.gelu(token @ experts.up[expert] + experts.up_bias[expert])
            output = output + logits[expert].exp() / total * (inner @ experts.down[expert] + experts.down_bias[expert])
        outputs.append(output)
    return torch.stack(outputs).view(inputs.shape)


def _gradients(module: MixtureOfExperts, inputs: Tensor, outputs: Tensor) -> list[Tensor]:
    """Return the gradients of a loss that weighs every output differently. A missing gradient raises an error."""
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view(outputs.shape)
    return list(torch.autograd.grad((outputs * weights).sum(), [inputs, *module.parameters()]))


@pytest.mark.parametrize("experts_per_token", [1, 2, EXPERTS])
@pytest.mark.parametrize("shape", [(1,), (3, 7)])
def test_outputs_and_gradients_equal_a_loop_over_tokens(experts_per_token: int, shape: tuple[int, ...]) -> None:
    module, inputs = _mixture(experts_per_token), _inputs(*shape)
    outputs, expected = module(inputs), _run_token_by_token(module, inputs)
    assert outputs.shape == inputs.shape
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-13)
    pairs = zip(_gradients(module, inputs, outputs), _gradients(module, inputs, expected), strict=True)
    for gradient, other in pairs:
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-13)


def test_unused_expert_has_zero_gradients() -> None:
    module, inputs = _mixture(2), _inputs(6)
    with torch.no_grad():
        module.router.weight[3] = -100.0
    torch.autograd.backward(module(inputs).sum())
    for parameter in module.experts.parameters():
        assert parameter.grad is not None
        rows = parameter.grad.flatten(1).abs().amax(dim=1)
        assert rows[3] == 0
        assert rows.max() > 0


def test_empty_input_gives_all_parameters_a_gradient() -> None:
    module, inputs = _mixture(2), _inputs(1, 0)
    outputs = module(inputs)
    assert outputs.shape == (1, 0, HIDDEN)
    torch.autograd.backward(outputs.sum())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters())


def test_first_experts_win_among_equal_logits() -> None:
    module, inputs = _mixture(2), _inputs(4)
    with torch.no_grad():
        module.router.weight.zero_()
    torch.autograd.backward(module(inputs).sum())
    gradient = module.experts.down_bias.grad
    assert gradient is not None
    # Each of four tokens gives half of its weight to either expert.
    assert gradient.sum(dim=1).tolist() == [2.0 * HIDDEN, 2.0 * HIDDEN, 0, 0, 0]


def test_results_are_deterministic() -> None:
    module, inputs = _mixture(2), _inputs(50)
    first, second = module(inputs), module(inputs)
    assert torch.equal(first, second)
    pairs = zip(_gradients(module, inputs, first), _gradients(module, inputs, second), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_output_of_a_token_does_not_depend_on_other_tokens() -> None:
    module, inputs = _mixture(2), _inputs(20)
    torch.testing.assert_close(module(inputs)[7:9], module(inputs[7:9]), rtol=0, atol=1e-13)


@pytest.mark.parametrize("experts_per_token", [0, EXPERTS + 1])
def test_experts_per_token_must_be_in_range(experts_per_token: int) -> None:
    with pytest.raises(ValueError, match=f"`experts_per_token` is {experts_per_token}.* 5"):
        MixtureOfExperts(hidden=HIDDEN, experts=EXPERTS, experts_per_token=experts_per_token)


@pytest.mark.parametrize(("ranks", "problem"), [((2, 1), "`ep` is 2.* 5 experts"), ((5, 3), "`tp` is 3.* 8")])
def test_ranks_must_divide_the_experts_and_their_width(ranks: tuple[int, int], problem: str) -> None:
    mesh: Any = SimpleNamespace(size=lambda dimension: ranks[dimension])
    with pytest.raises(ValueError, match=problem):
        shard_experts(_mixture(2), cast(DeviceMesh, mesh), cast(DeviceMesh, mesh))
