"""`ebbtide checkpoint export` and `verify` on checkpoints of scripts, of the trainer and of torch itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner, Result

from cli.app import app
from ebbtide.checkpoints import export, save_checkpoint
from ebbtide.checkpoints.checksums import read_checksums
from ebbtide.checkpoints.piece_reader import PieceReader
from scheduler.domain.parallel_plan import LayerStrategy, Stage, plan_to_json
from scheduler.trainer.layout import make_data_parallel_plan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE: dict[str, Any] = {
    "model": {"embedding.weight": torch.arange(12.0).view(4, 3), "head.bias": torch.ones(5, dtype=torch.bfloat16)},
    "optimizer": {"state": {"head.bias": {"exp_avg": torch.full((5,), 2.0)}}, "lr": 0.5},
    "step": 7,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (6, 7):
        save_checkpoint({**STATE, "step": step}, tmp_path / "run", step=step)
    return tmp_path / "run"


def _run(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


def _export(folder: Path, target: Path, *words: str) -> dict[str, Any]:
    result = _run("export", folder, target, *words, "-o", "json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_torch_export_is_the_whole_state_of_the_newest_checkpoint(folder: Path, tmp_path: Path) -> None:
    document = _export(folder, tmp_path / "whole.pt", "--format", "torch")
    assert document["verified"]
    assert document["checkpoint"] == str(folder / "step-7")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert state["step"] == 7
    assert state["optimizer"]["lr"] == 0.5
    assert _equal(state["model"], STATE["model"])


def test_safetensors_export_has_the_weights_under_their_own_names(folder: Path, tmp_path: Path) -> None:
    document = _export(folder / "step-6", tmp_path / "weights.safetensors", "--format", "safetensors")
    assert (document["tensors"], document["bytes"]) == (2, 58)
    assert _equal(load_file(tmp_path / "weights.safetensors"), STATE["model"])
    _export(folder, tmp_path / "moments.safetensors", "--format", "safetensors", "--prefix", "optimizer.state.")
    assert list(load_file(tmp_path / "moments.safetensors")) == ["head.bias.exp_avg"]


def test_hf_export_is_sharded_with_an_index_and_the_config(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert _export(folder, tmp_path / "one", "--format", "hf")["config"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    monkeypatch.setattr(export, "SHARD_BYTES_MAX", 50)
    _export(folder, tmp_path / "two", "--format", "hf")
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 58}
    loaded = {name: load_file(tmp_path / "two" / file)[name] for name, file in index["weight_map"].items()}
    assert _equal(loaded, STATE["model"])
    assert len(set(index["weight_map"].values())) == 2


def test_checkpoint_of_torch_is_exported_without_verification(tmp_path: Path) -> None:
    save(STATE, checkpoint_id=tmp_path / "dcp")
    document = _export(tmp_path / "dcp", tmp_path / "weights.safetensors", "--format", "safetensors")
    assert not document["verified"]
    assert _equal(load_file(tmp_path / "weights.safetensors"), STATE["model"])
    assert _run("verify", tmp_path / "dcp").exit_code == 1


def test_damaged_checkpoint_is_found_and_not_exported(folder: Path, tmp_path: Path) -> None:
    assert _run("verify", folder).exit_code == 0
    file = folder / "step-7" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(STATE["model"]["embedding.weight"].numpy().tobytes()) + 5] ^= 4
    file.write_bytes(content)
    assert _run("verify", folder).exit_code == 1
    for name in ("torch", "safetensors", "hf"):
        assert _run("export", folder, tmp_path / name, "--format", name).exit_code == 1
        assert not (tmp_path / name).exists()


def test_users_checkpoint_is_resharded_for_a_plan(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": {
            "embed_tokens.weight": torch.randn(10, 8),
            **{f"layers.{k}.mlp.up_proj.weight": torch.randn(16, 8) for k in range(2)},
            **{f"layers.{k}.mlp.down_proj.weight": torch.randn(8, 16) for k in range(2)},
            **{f"layers.{k}.conv.weight": torch.randn(4, 2, 3) for k in range(2)},
            "norm.bias": torch.randn(8),
        },
        "scale": torch.tensor(2.0),
        "step": 7,
    }
    save(state, checkpoint_id=tmp_path / "dcp")
    # Two pipeline stages: tensor parallelism over two ranks, and ZeRO over two.
    strategies = (LayerStrategy(1, tp=2), LayerStrategy(1, dp=2, zero=3))
    stages = tuple(Stage(k, k, "a100", 2, (strategy,)) for k, strategy in enumerate(strategies))
    plan = replace(make_data_parallel_plan(replicas=2, global_batch=2), stages=stages)
    (tmp_path / "plan.json").write_text(json.dumps(plan_to_json(plan)))
    result = _run("reshard", tmp_path / "dcp", tmp_path / "new", "--plan", tmp_path / "plan.json", "-o", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ranks"] == 4
    assert _run("verify", tmp_path / "new").exit_code == 0
    loaded: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "scale": torch.tensor(0.0),
        "step": 0,
    }
    load(loaded, checkpoint_id=tmp_path / "new")
    assert loaded["step"] == 7
    assert loaded["scale"] == 2.0
    assert _equal(loaded["model"], state["model"])
    stored = read_checksums(tmp_path / "new")
    assert stored is not None
    assert {piece.file for piece in stored.pieces.values()} == {f"__{rank}_0.distcp" for rank in range(4)}
    entries = PieceReader(tmp_path / "new", node="").read_metadata().state_dict_metadata
    chunks = {
        name: [tuple(chunk.sizes) for chunk in entry.chunks]
        for name, entry in entries.items()
        if "layers" in name and isinstance(entry, TensorStorageMetadata)
    }
    assert chunks["model.layers.0.mlp.up_proj.weight"] == [(8, 8), (8, 8)]
    assert chunks["model.layers.0.mlp.down_proj.weight"] == [(8, 8), (8, 8)]
    assert chunks["model.layers.1.mlp.down_proj.weight"] == [(4, 16), (4, 16)]
    assert chunks["model.layers.1.conv.weight"] == [(2, 2, 3), (2, 2, 3)]
    short = replace(plan, stages=stages[:1])
    (tmp_path / "plan.json").write_text(json.dumps(plan_to_json(short)))
    assert _run("reshard", tmp_path / "dcp", tmp_path / "no", "--plan", tmp_path / "plan.json").exit_code == 2
    assert not (tmp_path / "no").exists()


def test_existing_targets_missing_checkpoints_and_unknown_prefixes_are_refused(folder: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert _run("export", folder, taken, "--format", "torch").exit_code == 1
    assert taken.read_text() == "mine"
    assert _run("export", tmp_path / "none", tmp_path / "new", "--format", "torch").exit_code == 1
    assert _run("export", folder, tmp_path / "new", "--format", "hf", "--prefix", "encoder.").exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]
