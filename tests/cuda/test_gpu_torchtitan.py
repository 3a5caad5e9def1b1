"""torchtitan's own trainer with the example's configuration, on one GPU over three generations."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cuda.conftest import TORCH_RELEASE
from tests.cuda.gpu_trainings import REPOSITORY, GpuTraining, assert_same_losses, check_statuses
from tests.cuda.titan_assets import write_assets

RUNNER = Path(__file__).with_name("titan_runner.py")
STEPS, LEAVES = 12, (4, 9)
PACKAGES = ("torchtitan", "torchdata", "spmd_types", "tyro", "tokenizers", "tensorboard")
OPTIONS = (
    *("--module", "elastic_llama", "--config", "elastic_llama3_debugmodel", "--metrics.disable_color_printing"),
    *("--training.steps", str(STEPS), "--training.seq_len", "256", "--checkpoint.interval", "1000"),
    *("--debug.seed", "3", "--debug.deterministic", "--debug.deterministic_warn_only"),
)
_LOSS = re.compile(r"step: +(\d+) +loss: +([\d.]+)")


def _open(root: Path, *options: str) -> GpuTraining:
    root.mkdir()
    write_assets(root)
    paths = {"PYTHONPATH": str(REPOSITORY / "examples" / "torchtitan"), "NO_COLOR": "1"}
    assets = ("--hf_assets_path", str(root / "tests/assets/tokenizer"))
    texts = ("--dataloader.inner.dataset_path", str(root / "tests/assets/c4_test"))
    return GpuTraining(root, [str(RUNNER), *OPTIONS, *assets, *texts, *options], paths)


def _read_losses(training: GpuTraining) -> dict[int, float]:
    found = [match for line in training.read_lines() if (match := _LOSS.search(line))]
    losses = {int(match[1]): float(match[2]) for match in found}
    assert len(losses) == len(found), training.logs()  # no step was trained twice
    return losses


@pytest.mark.skipif(TORCH_RELEASE < (2, 13), reason="torchtitan 0.3 needs torch 2.13")
@pytest.mark.skipif(
    any(find_spec(package) is None for package in PACKAGES), reason=f"torchtitan needs {', '.join(PACKAGES)}"
)
@pytest.mark.parametrize("options", [(), ("--training.disable_cuda_graphs",)], ids=["cuda-graphs", "eager"])
def test_trainer_of_torchtitan_loses_no_step_in_three_generations(options: tuple[str, ...], tmp_path: Path) -> None:
    plain, elastic = _open(tmp_path / "plain", *options), _open(tmp_path / "elastic", *options)
    plain.run()
    for until in (*LEAVES, 0):
        elastic.run(until=until)
    check_statuses(elastic, steps=STEPS, leaves=LEAVES)
    losses = _read_losses(elastic)
    # Activations are in bfloat16, and torchtitan prints five digits.
    assert_same_losses(losses, _read_losses(plain), tolerance=1e-3)
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1]
