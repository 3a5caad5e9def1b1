"""Generations of a training on a GPU: resumed losses, checkpoints that move between devices, and damage."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.checkpoint_manifest import checkpoint_path, list_checkpoint_steps
from tests.cuda.conftest import TORCH_RELEASE
from tests.cuda.trainer_runs import run_generation
from tests.e2e.rank_launcher import RankLauncher, Training, launch_ranks, make_plan

L = LayerStrategy
BATCH = 8
saves_twice = pytest.mark.skipif(TORCH_RELEASE < (2, 13), reason="a stager of torch before 2.13 serves one save only")
OPTIONS = ("--global-batch", str(BATCH), "--seed", "3", "--learning-rate", "0.003")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankLauncher]:
    with launch_ranks(tmp_path_factory.mktemp("agent")) as started:
        yield started


@saves_twice
@pytest.mark.parametrize(
    ("words", "strategy", "tolerance"),
    [
        ((), L(2), 1e-4),
        (("--autocast", "bf16", "--optimizer", "muon", "--dropout", "0.1"), L(2), 2e-2),
        (("--autocast", "fp16", "--clip-norm", "1"), L(2), 2e-2),
        (("--dtype", "float64"), L(2, zero=3), 1e-9),
        (("--dtype", "float64"), L(2, zero=1, offload=True), 1e-9),
    ],
    ids=["float32", "bf16, muon and dropout", "fp16", "sharded", "offloaded"],
)
def test_losses_of_two_generations_are_those_of_one(
    launcher: RankLauncher, tmp_path: Path, words: tuple[str, ...], strategy: LayerStrategy, tolerance: float
) -> None:
    whole, resumed = (
        Training(tmp_path / name, "nano-gpt", 12, (*OPTIONS, "--checkpoint-every", "2", "--keep", "10", *words))
        for name in ("whole", "resumed")
    )
    plan = make_plan((strategy,), batch=BATCH)
    launcher.run(whole, plan)
    launcher.run(resumed, plan, until=5)
    first = launcher.generation
    [status] = launcher.run(resumed, plan)
    assert (status["phase"], status["step"], status["checkpoint_step"]) == ("succeeded", 12, 12)
    assert list_checkpoint_steps(resumed.checkpoints) == [12, 10, 8, 6, 5, 4, 2]
    assert resumed.digests("loaded") == {(first + 1, 5): resumed.digests("saved")[first, 5]}
    assert resumed.losses() == pytest.approx(whole.losses(), abs=tolerance)
    assert resumed.losses()[12] < resumed.losses()[1]
    assert status["phases_s"].keys() >= {"start", "load", "first_step"}


def _read_metadata(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


@saves_twice
def test_background_saves_copy_into_pinned_memory_and_say_how_long_they_blocked(
    launcher: RankLauncher, tmp_path: Path
) -> None:
    training = Training(tmp_path, "tiny-gpt", 8, (*OPTIONS, "--checkpoint-every", "2", "--keep", "10"))
    [status] = launcher.run(training, make_plan((L(1),), batch=BATCH))
    log = next(tmp_path.glob("run-*/rank-0.log")).read_text()
    saved = [line for line in log.splitlines() if "blocked training for" in line]
    assert len(saved) == 4, log[-3000:]
    assert [float(line.split()[-2]) < 1.0 for line in saved[1:]] == [True] * 3, saved
    weight = _read_metadata(checkpoint_path(training.checkpoints, 4))["model.blocks.0.attention.project_in.weight"]
    assert weight.properties.pin_memory, "the copy was not in pinned memory"
    assert status["checkpoint_step"] == 8


@pytest.mark.parametrize("first_on_gpu", [True, False], ids=["GPU, then CPU", "CPU, then GPU"])
def test_training_moves_between_devices(tmp_path: Path, first_on_gpu: bool) -> None:
    whole, moved = (Training(tmp_path / name, "nano-gpt", 8, OPTIONS) for name in ("whole", "moved"))
    assert run_generation(whole, 1, on_gpu=False).code == 0
    begun = run_generation(moved, 1, on_gpu=first_on_gpu, steps=4)
    assert begun.code == 0, begun.log
    ended = run_generation(moved, 2, on_gpu=not first_on_gpu)
    assert ended.code == 0, ended.log
    assert moved.first_steps() == {1: 1, 2: 5}
    assert moved.losses() == pytest.approx(whole.losses(), abs=1e-4)
    assert moved.digests("loaded")[2, 4] == moved.digests("saved")[1, 4]


def test_a_standard_reader_reads_a_checkpoint_of_a_gpu(tmp_path: Path) -> None:
    training = Training(tmp_path, "nano-gpt", 3, OPTIONS)
    ended = run_generation(training, 1, on_gpu=True)
    assert ended.code == 0, ended.log
    dcp_to_torch_save(checkpoint_path(training.checkpoints, 3), tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    weight = state["model"]["blocks.1.attention.project_in.weight"]
    assert (weight.device.type, tuple(weight.shape), weight.dtype) == ("cpu", (96, 32), torch.float32)
    assert 0.0 < weight.abs().mean() < 1.0
    assert set(state["random"]) == {"cpu", "cuda"}


@saves_twice
def test_one_flipped_bit_is_found_and_the_previous_checkpoint_is_loaded(tmp_path: Path) -> None:
    training = Training(tmp_path, "nano-gpt", 8, (*OPTIONS, "--checkpoint-every", "2"))
    begun = run_generation(training, 1, on_gpu=True, steps=6)
    assert begun.code == 0, begun.log
    [file] = checkpoint_path(training.checkpoints, 6).glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 16
    file.write_bytes(content)
    ended = run_generation(training, 2, on_gpu=True)
    assert ended.code == 0, ended.log
    assert "Falling back to the previous checkpoint" in ended.log
    assert training.first_steps() == {1: 1, 2: 5}
    assert ended.status["checkpoint_step"] == 8


def test_sequences_of_unlike_lengths_train_on_a_gpu(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("64\n16\n40\n8\n")
    words = (*OPTIONS, "--dtype", "float64", "--dropout", "0.1", "--lengths", str(lengths))
    on_gpu, on_cpu = (Training(tmp_path / name, "nano-gpt", 4, words) for name in ("gpu", "cpu"))
    for training in (on_gpu, on_cpu):
        ended = run_generation(training, 1, on_gpu=training is on_gpu)
        assert ended.code == 0, ended.log
    assert on_gpu.losses() == pytest.approx(on_cpu.losses(), abs=1e-9)


def test_outputs_of_frozen_blocks_are_stored_and_read_on_a_gpu(tmp_path: Path) -> None:
    plain = (*OPTIONS, "--dtype", "float64", "--freeze", "2:1", "--evaluate-every", "3")
    cached = Training(tmp_path / "cached", "nano-gpt", 6, (*plain, "--frozen-cache", str(tmp_path / "cache")))
    computed = Training(tmp_path / "computed", "nano-gpt", 6, plain)
    for training in (cached, computed):
        ended = run_generation(training, 1, on_gpu=True)
        assert ended.code == 0, ended.log
    assert cached.losses() == pytest.approx(computed.losses(), abs=1e-9)
    assert [line["step"] for line in cached.lines("evaluations-*")] == [3, 6]
