"""`ebbtide.elastic` on a GPU: wrappers, scaler, random numbers, devices and memory of a restored state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.gpu_trainings import SEEDED, GpuTraining, assert_same_losses, check_statuses
from tests.e2e.framework_trainings import mean_losses

SCRIPT = Path(__file__).with_name("elastic_gpu_script.py")
STEPS, LEAVES = 24, (5, 16)


def _open(root: Path, *options: str) -> GpuTraining:
    return GpuTraining(root, [str(SEEDED), "0", str(SCRIPT), str(STEPS), *options])


def _read_losses(training: GpuTraining) -> dict[int, float]:
    return mean_losses(["\n".join(training.read_lines())])


def _read_marked(training: GpuTraining, mark: str) -> list[Any]:
    """Return the values that all generations have printed after a word."""
    lines = (line.partition(" ") for line in training.read_lines())
    return [json.loads(value) for word, _, value in lines if word == mark]


@pytest.mark.parametrize(
    "options",
    [(), ("ddp", "float16"), ("compile",), ("ddp", "compile", "float16")],
    ids=lambda options: "-".join(options) or "plain",
)
def test_interrupted_training_continues_exactly_on_a_gpu(options: tuple[str, ...], tmp_path: Path) -> None:
    plain, elastic = _open(tmp_path / "plain", *options), _open(tmp_path / "elastic", *options)
    plain.run()
    for until in (*LEAVES, 0):
        elastic.run(until=until)
    check_statuses(elastic, steps=STEPS, leaves=LEAVES)
    # Dropout draws from the generator of the GPU, so equal losses need its restored state.
    assert_same_losses(_read_losses(elastic), _read_losses(plain), tolerance=1e-6)
    assert _read_marked(elastic, "random") == _read_marked(plain, "random")
    states = _read_marked(elastic, "state")
    assert [state["resumed"] for state in states] == [0, *LEAVES]
    assert [state["devices"] for state in states] == [["cuda"]] * 3
    if "float16" in options:
        assert [state["scale"] for state in states] == [8.0, 16.0, 256.0]


def test_checkpoint_of_a_compiled_model_fits_a_plain_one_in_ddp(tmp_path: Path) -> None:
    elastic, plain = _open(tmp_path / "elastic", "steady", "compile"), _open(tmp_path / "plain", "steady")
    plain.run()
    elastic.run(until=5)
    elastic.argv = [*elastic.argv[:-1], "ddp"]
    elastic.run()
    check_statuses(elastic, steps=STEPS, leaves=(5,))
    # Compiled kernels round in another order.
    assert_same_losses(_read_losses(elastic), _read_losses(plain), tolerance=1e-3)


def test_restoring_needs_no_second_copy_on_the_gpu(tmp_path: Path) -> None:
    training = _open(tmp_path, "wide")
    training.run(until=1)
    training.run(until=2)
    first, second = _read_marked(training, "state")
    parameters = second["parameter_bytes"]
    assert first["bytes"] == pytest.approx(parameters, rel=0.01)
    # Parameters and two moments stay. Gradients of zeros exist while the optimizer creates its state.
    assert second["bytes"] == pytest.approx(3 * parameters, rel=0.01)
    assert second["peak_bytes"] <= 4.05 * parameters, second
