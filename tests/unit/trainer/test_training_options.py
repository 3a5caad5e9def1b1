"""Options of trainings of one rank: optimizers, clipping, dropout and compilation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from scheduler.trainer.counter_random import derive_key
from scheduler.trainer.dropout import TokenDropout
from scheduler.trainer.gradients import compute_clip_factor
from scheduler.trainer.model import Block, GptSize, build_gpt, compile_blocks
from scheduler.trainer.optimizer import OptimizerName
from scheduler.trainer.settings import Autocast, TrainerSettings, validate_settings
from scheduler.trainer.sharded_optimizers import ShardedSGD, orthogonalize
from tests.unit.trainer.test_trainer import SETTINGS, _environment, _losses, _train


@pytest.mark.parametrize(
    "settings",
    [
        replace(SETTINGS, optimizer=OptimizerName.SGD, learning_rate=0.1, clip_norm=0.5),
        replace(SETTINGS, optimizer=OptimizerName.MUON),
        replace(SETTINGS, optimizer=OptimizerName.MUON, model="nano-moe", dropout=0.2),
        replace(SETTINGS, compile_backend="aot_eager", dropout=0.2),
    ],
    ids=["sgd clipped", "muon", "muon with experts and dropout", "compiled"],
)
def test_training_learns_and_continues_after_a_restart(tmp_path: Path, settings: TrainerSettings) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _train(_environment(whole), replace(settings, steps=6, ledger_dir=whole))
    for steps in (4, 6):
        _train(_environment(parts), replace(settings, steps=steps, ledger_dir=parts))
    assert _losses(parts) == _losses(whole)
    assert _losses(whole)[-1] < _losses(whole)[0]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's imports
def test_compiled_blocks_compute_what_eager_ones_do(tmp_path: Path, backend: str) -> None:
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    settings = replace(SETTINGS, dtype="float64", dropout=0.2)
    _train(_environment(eager), replace(settings, ledger_dir=eager))
    _train(_environment(compiled), replace(settings, compile_backend=backend, ledger_dir=compiled))
    assert _losses(compiled) == pytest.approx(_losses(eager), abs=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_all_blocks_share_one_compiled_graph(dropout: float) -> None:
    """torch compiles one function eight times at most and runs it eagerly after that."""
    size = GptSize(layers=10, hidden=16, heads=2, vocabulary=16, sequence=8)
    torch._dynamo.reset()
    counters.clear()
    model = build_gpt(size, seed=1, dtype=torch.float32)
    for number, block in enumerate(model.blocks.values()):
        assert isinstance(block, Block)
        block.attention_dropout = TokenDropout(dropout, derive_key(number, "attention"))
        block.feed_forward_dropout = TokenDropout(dropout, derive_key(number, "feed-forward"))
    compile_blocks(model, backend="aot_eager")
    numbers = torch.arange(16).view(2, 8)
    inputs = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    for block in model.blocks.values():
        expected = block.compute_eagerly(inputs, numbers)  # type: ignore[operator]  # of a Block
        assert torch.allclose(block(inputs, numbers), expected, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


def test_sgd_steps_are_those_of_torch() -> None:
    mine, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    sharded = ShardedSGD([mine], lr=0.1, weight_decay=0.01)
    plain = torch.optim.SGD([theirs], lr=0.1, weight_decay=0.01, momentum=0.9)
    for step in range(3):
        mine.grad, theirs.grad = (torch.full((3,), step + 1.0) for _ in range(2))
        sharded.step()
        plain.step()
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (3, 8, 16)])
def test_orthogonalized_matrices_have_singular_values_near_1(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert 0.3 < values.min() < values.max() < 1.3
    assert torch.linalg.svdvals(matrices).max() > 3


def test_gradients_below_the_norm_are_not_clipped() -> None:
    assert compute_clip_factor(torch.tensor(0.5), 1.0).item() == 1.0
    assert compute_clip_factor(torch.tensor(4.0), 1.0).item() == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (TrainerSettings(dropout=1.0), "`--dropout` is 1.0"),
        (TrainerSettings(clip_norm=-1.0), "`--clip-norm` is -1.0"),
        (TrainerSettings(clip_norm=float("nan")), "`--clip-norm` is nan"),
        (TrainerSettings(autocast=Autocast.BF16, dtype="float64"), "`--autocast` is bf16, but `--dtype` is float64"),
        (TrainerSettings(evaluation_hook="a:b"), "`--evaluate-every`"),
        (TrainerSettings(evaluate_every=1, lengths=Path("lengths")), "`--lengths`"),
    ],
)
def test_invalid_options_are_rejected_with_name_and_value(settings: TrainerSettings, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        validate_settings(settings)
