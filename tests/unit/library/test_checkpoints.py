"""Checkpoints of any script: standard DCP on disk, verified on load, with fall-back to the previous one."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ebbtide.checkpoints import CheckpointError, load_newest_checkpoint, save_checkpoint
from ebbtide.checkpoints.nonfinite_losses import record_nonfinite_loss
from ebbtide.environment import RankEnvironment
from ebbtide.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(300, 1000, generator=generator),
            "bias": torch.randn(7, generator=generator, dtype=torch.float64),
            "half": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
            "transposed": torch.randn(4, 9, generator=generator).t(),
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 4),
        },
        "epoch": seed,
        "options": {"betas": [0.9, 0.95], "name": "adam"},
    }


def _equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(torch.equal(value, second["model"][name]) for name, value in first["model"].items()) and (
        first["epoch"] == second["epoch"] and first["options"] == second["options"]
    )


def test_state_is_loaded_as_saved(tmp_path: Path) -> None:
    assert load_newest_checkpoint(_state(), tmp_path) is None
    assert save_checkpoint(_state(1), tmp_path, step=5) == tmp_path / "step-5"
    loaded = _state(2)
    assert load_newest_checkpoint(loaded, tmp_path) == 5
    assert _equal(loaded, _state(1))


def test_checkpoint_is_standard_dcp(tmp_path: Path) -> None:
    path = save_checkpoint(_state(1), tmp_path, step=5)
    loaded = _state(2)
    load(loaded, checkpoint_id=path)
    assert _equal(loaded, _state(1))
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    assert _equal(torch.load(tmp_path / "whole.pt"), _state(1))


def test_checkpoint_of_torch_itself_is_loaded(tmp_path: Path) -> None:
    save(_state(1), checkpoint_id=tmp_path / "step-3")
    loaded = _state(2)
    assert load_newest_checkpoint(loaded, tmp_path) == 3
    assert _equal(loaded, _state(1))


@pytest.mark.parametrize("seed", range(12))
def test_one_flipped_bit_anywhere_falls_back_to_the_previous_checkpoint(tmp_path: Path, seed: int) -> None:
    save_checkpoint(_state(1), tmp_path, step=1)
    path = save_checkpoint(_state(2), tmp_path, step=2)
    generator = random.Random(seed)
    files = sorted(path.iterdir())
    file = files[seed % len(files)]
    content = bytearray(file.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    file.write_bytes(content)
    loaded = _state(3)
    assert load_newest_checkpoint(loaded, tmp_path) == 1
    assert _equal(loaded, _state(1))
    assert (tmp_path / "step-2.damaged").is_dir()


def test_damage_of_all_checkpoints_is_an_error_at_every_start(tmp_path: Path) -> None:
    path = save_checkpoint(_state(1), tmp_path, step=1)
    (path / "__0_0.distcp").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError):
            load_newest_checkpoint(_state(), tmp_path)


def test_checkpoint_after_which_the_loss_was_twice_non_finite_is_set_aside(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(_state(step), tmp_path, step=step)
    record_nonfinite_loss(tmp_path, step=2, generation=4)
    record_nonfinite_loss(tmp_path, step=2, generation=4)
    assert load_newest_checkpoint(_state(), tmp_path) == 2
    record_nonfinite_loss(tmp_path, step=2, generation=5)
    assert load_newest_checkpoint(_state(), tmp_path) == 1
    save_checkpoint(_state(9), tmp_path, step=2)
    assert load_newest_checkpoint(_state(), tmp_path) == 2


def test_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    save_checkpoint(_state(1), tmp_path, step=1)
    other = _state(2)
    other["model"]["weight"] = torch.zeros(300, 500)
    before = {name: value.clone() for name, value in other["model"].items()}
    with pytest.raises(CheckpointError, match=r"model\.weight .*300x1000.*300x500"):
        load_newest_checkpoint(other, tmp_path)
    assert all(torch.equal(value, other["model"][name]) for name, value in before.items())
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    with pytest.raises(CheckpointError, match="later step 1"):
        save_checkpoint(other, tmp_path, step=0)


def test_old_checkpoints_are_pruned_and_interrupted_ones_removed(tmp_path: Path) -> None:
    for remains in (".step-9.partial", ".step-8.damaged.deleted", "step-0.damaged"):
        (tmp_path / remains).mkdir()
    for step in (1, 2, 3):
        save_checkpoint({"x": torch.ones(2)}, tmp_path, step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_session_records_a_loss_that_stays_non_finite(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    environment = RankEnvironment(run_dir=tmp_path / "run", checkpoint_dir=tmp_path / "checkpoints")
    for step in (1, 2):
        save_checkpoint(_state(step), tmp_path / "checkpoints", step=step)
    for generation, losses in ((1, [math.nan]), (2, [math.inf, 1.0]), (3, [1.0]), (4, [2.0, math.nan])):
        assert load_newest_checkpoint(_state(), tmp_path / "checkpoints") == 2
        with Session(replace(environment, generation=generation)) as session:
            session.mark_resumed(2)
            for loss in losses:
                session.report(step=3, loss=loss)
            session.leave()
    assert load_newest_checkpoint(_state(), tmp_path / "checkpoints") == 1
