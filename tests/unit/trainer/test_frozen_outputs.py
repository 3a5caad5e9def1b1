"""The cache of frozen blocks' outputs in trainings of one rank."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from scheduler.trainer import dataset, frozen_outputs
from scheduler.trainer.checkpoint_manifest import checkpoint_path
from scheduler.trainer.model import SIZES, Block
from scheduler.trainer.settings import TrainerSettings
from tests.unit.trainer.test_trainer import _environment, _losses, _train

WINDOWS = 23
SETTINGS = TrainerSettings(
    model="nano-gpt", global_batch=12, seed=1, dtype="float64", freeze=((1, 1),), checkpoint_every=1, keep=20
)
"""Two steps are a pass over the text and one sample more."""


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = dataset._read_bundled_text()[: WINDOWS * SIZES["nano-gpt"].sequence + 1]
    monkeypatch.setattr(dataset, "_read_bundled_text", lambda: text)


@pytest.fixture
def computed_blocks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the forward passes of blocks, by `trained` and `frozen`."""
    counts, run = Counter[str](), Block.forward

    def count_and_run(block: Block, inputs: Tensor, tokens: Tensor | None) -> Tensor:
        counts["trained" if block.attention_norm.weight.requires_grad else "frozen"] += 1
        return run(block, inputs, tokens)

    monkeypatch.setattr(Block, "forward", count_and_run)
    return counts


def test_frozen_blocks_are_computed_once_for_each_window(tmp_path: Path, computed_blocks: Counter[str]) -> None:
    """One of two blocks freezes after step 1. All windows are stored after at most two passes of two steps each."""
    plain, cached = tmp_path / "plain", tmp_path / "cached"
    _train(_environment(plain), replace(SETTINGS, steps=9, ledger_dir=plain))
    assert computed_blocks == {"trained": 10, "frozen": 8}
    computed_blocks.clear()
    _train(_environment(cached), replace(SETTINGS, steps=9, ledger_dir=cached, frozen_cache=tmp_path / "outputs"))
    assert computed_blocks["trained"] == 10
    assert 2 <= computed_blocks["frozen"] <= 4
    assert _losses(cached) == pytest.approx(_losses(plain), abs=1e-9)
    [complete] = (tmp_path / "outputs").glob("*/1/complete")
    assert len(set(complete.read_text().split())) == WINDOWS


def test_cache_outlasts_a_restart(tmp_path: Path, computed_blocks: Counter[str]) -> None:
    settings = replace(SETTINGS, frozen_cache=tmp_path / "outputs")
    _train(_environment(tmp_path), replace(settings, steps=6))
    computed_blocks.clear()
    _train(_environment(tmp_path), replace(settings, steps=8))
    assert computed_blocks == {"trained": 2}


def test_outputs_of_other_weights_are_deleted(tmp_path: Path, computed_blocks: Counter[str]) -> None:
    """The block froze after step 2, but the training continues from step 1, so that other weights freeze."""
    settings = replace(SETTINGS, freeze=((2, 1),), frozen_cache=tmp_path / "outputs")
    _train(_environment(tmp_path), replace(settings, steps=7))
    for step in range(2, 8):
        shutil.rmtree(checkpoint_path(tmp_path / "checkpoints", step))
    computed_blocks.clear()
    environment = replace(_environment(tmp_path), frozen_layers=1)
    _train(environment, replace(settings, steps=3, ledger_dir=tmp_path))
    assert computed_blocks == {"trained": 2, "frozen": 2}


def test_outputs_are_deleted_after_a_restart_of_the_machine(
    tmp_path: Path, computed_blocks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, frozen_cache=tmp_path / "outputs")
    _train(_environment(tmp_path), replace(settings, steps=6))
    computed_blocks.clear()
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another boot")
    monkeypatch.setattr(frozen_outputs, "_BOOT_ID", boot_id)
    _train(_environment(tmp_path), replace(settings, steps=7))
    assert computed_blocks == {"trained": 1, "frozen": 1}


def test_trainings_with_other_settings_do_not_share_outputs(tmp_path: Path) -> None:
    for rate in (0.001, 0.002):
        settings = replace(SETTINGS, steps=2, learning_rate=rate, frozen_cache=tmp_path / "outputs")
        _train(_environment(tmp_path / str(rate)), settings)
    assert len(list((tmp_path / "outputs").glob("*/1/complete"))) == 2
