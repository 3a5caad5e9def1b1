"""Optimizers over a rank's own shards."""

import pytest
import torch
from torch.nn import Parameter

from scheduler.trainer import sharded_optimizers
from scheduler.trainer.sharded_optimizers import ShardedAdamW


def _train(*, steps: int, offloaded: bool) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    parameters = [Parameter(torch.randn(5, 3)), Parameter(torch.randn(7))]
    optimizer = ShardedAdamW(parameters, lr=1e-2, weight_decay=0.1, offloaded=parameters[:1] if offloaded else [])
    optimizer.init_state()
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    counts = [float(optimizer.state[parameter]["step"]) for parameter in parameters]
    return [parameter.detach() for parameter in parameters], counts


@pytest.mark.parametrize("offloaded", [False, True])
def test_fused_adamw_gives_the_same_weights_and_step_counts(offloaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, counts = _train(steps=3, offloaded=offloaded)
    monkeypatch.setattr(sharded_optimizers, "_FUSED_DEVICE", "cpu")
    fused_weights, fused_counts = _train(steps=3, offloaded=offloaded)
    assert counts == fused_counts == [3.0, 3.0]
    for weight, fused in zip(weights, fused_weights, strict=True):
        torch.testing.assert_close(fused, weight, rtol=1e-6, atol=1e-7)
