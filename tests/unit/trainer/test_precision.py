"""Mixed precision: rounding, the loss scale, and steps that overflow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ebbtide.environment import RankEnvironment
from ebbtide.session import Session
from scheduler.trainer import precision
from scheduler.trainer.checkpoint_manifest import checkpoint_path
from scheduler.trainer.engine import TrainingEngine
from scheduler.trainer.layout import build_layout, make_data_parallel_plan
from scheduler.trainer.precision import LossScaler, autocast_to, round_as_computed
from scheduler.trainer.settings import Autocast, TrainerSettings
from tests.unit.trainer.test_trainer import SETTINGS, _environment, _losses, _train

FP16 = replace(SETTINGS, autocast=Autocast.FP16, clip_norm=1.0, dropout=0.1)
OVERFLOWING_SCALE = 2.0**24
"""The largest float16 is 2^16. Some steps later gradients are finite."""


def test_weights_are_rounded_in_autocast_alone() -> None:
    weight = torch.tensor([1.001])
    assert round_as_computed(weight, torch.float32) is weight
    with autocast_to(torch.bfloat16, weight.device):
        assert round_as_computed(weight, torch.float32).item() == 1.0
        with autocast_to(None, weight.device):
            assert round_as_computed(weight, torch.float32) is weight


def test_scale_halves_with_an_overflow_and_doubles_after_2000_good_steps() -> None:
    scaler = LossScaler(enabled=True, device="cpu")
    scaler.update(overflowed=True)
    for _ in range(1999):
        scaler.update(overflowed=False)
    assert scaler.scale.item() == 2.0**15
    scaler.update(overflowed=False)
    assert scaler.scale.item() == 2.0**16


def test_scale_is_1_and_not_stored_without_float16() -> None:
    scaler = LossScaler(enabled=False, device="cpu")
    assert (scaler.scale.item(), scaler.state) == (1.0, {})


def test_step_that_overflows_changes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_INITIAL_SCALE", OVERFLOWING_SCALE)
    with Session(RankEnvironment()) as session:
        session.init_process_group()
        layout = build_layout(make_data_parallel_plan(replicas=1, global_batch=2), world_size=1, block_count=2)
        engine = TrainingEngine(FP16, layout, rank=0, device="cpu")
        engine.build()
        before = {name: weight.clone() for name, weight in engine.parts[0].module.state_dict().items()}
        losses = [engine.run_step(0, learning_rate=0.1) for _ in range(2)]
        session.succeed()
    after = engine.parts[0].module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert losses[0] == losses[1] == pytest.approx(5.55, abs=0.1)
    assert engine.loss_scaler.scale.item() == OVERFLOWING_SCALE / 4


def test_scale_continues_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart from the initial scale would skip steps again."""
    monkeypatch.setattr(precision, "_INITIAL_SCALE", OVERFLOWING_SCALE)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = replace(FP16, model="nano-moe")
    _train(_environment(whole), replace(settings, steps=16, ledger_dir=whole))
    for steps in (13, 16):
        _train(_environment(parts), replace(settings, steps=steps, ledger_dir=parts))
    assert _losses(parts) == _losses(whole)
    assert _losses(whole)[-1] < 5.4


@pytest.mark.parametrize("settings", [FP16, replace(SETTINGS, autocast=Autocast.BF16)], ids=["fp16", "bf16"])
def test_half_precision_learns_as_float32_does_and_continues_after_a_restart(
    tmp_path: Path, settings: TrainerSettings
) -> None:
    whole, parts, single = tmp_path / "whole", tmp_path / "parts", tmp_path / "single"
    _train(_environment(whole), replace(settings, steps=6, ledger_dir=whole))
    for steps in (4, 6):
        _train(_environment(parts), replace(settings, steps=steps, ledger_dir=parts))
    _train(_environment(single), replace(settings, autocast=Autocast.NONE, steps=6, ledger_dir=single))
    assert _losses(parts) == _losses(whole)
    assert _losses(whole) != _losses(single)
    assert _losses(whole) == pytest.approx(_losses(single), abs=0.02)


def test_another_precision_does_not_continue_a_training(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    _train(environment, replace(SETTINGS, steps=1))
    with pytest.raises(ValueError, match="`autocast` is None, but this training has 'bf16'"):
        _train(environment, replace(SETTINGS, autocast=Autocast.BF16))
    manifest = json.loads((checkpoint_path(tmp_path / "checkpoints", 1) / "manifest.json").read_text())
    assert "autocast" not in manifest["settings"], "checkpoints of versions without the setting stay valid"
