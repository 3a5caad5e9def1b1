"""Each example, as a job of one GPU over several generations, trains as without an interruption."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cuda.gpu_examples import BY_NOTICE, BY_SIGNAL, GpuExample
from tests.cuda.gpu_trainings import assert_same_losses, check_statuses
from tests.e2e.example_scripts import prepare_data


@pytest.mark.parametrize("example", BY_NOTICE, ids=lambda example: example.name)
def test_generations_on_a_gpu_have_the_losses_of_an_uninterrupted_training(example: GpuExample, tmp_path: Path) -> None:
    if find_spec(example.framework) is None:
        pytest.skip(f"{example.framework} is not installed")
    data = prepare_data(tmp_path)
    plain, elastic = example.open(tmp_path / "plain", data), example.open(tmp_path / "elastic", data)
    plain.run()
    for until in (*example.leaves, 0):
        elastic.run(until=until)
    check_statuses(elastic, steps=example.steps, leaves=example.leaves)
    seen = example.read_losses(elastic)
    assert len(seen) == example.steps, elastic.logs()
    assert_same_losses(seen, example.read_losses(plain), tolerance=example.tolerance)
    assert seen[example.steps] <= 0.9 * seen[1]


def test_script_that_saves_on_a_signal_loses_no_step(tmp_path: Path) -> None:
    data = prepare_data(tmp_path)
    plain, elastic = BY_SIGNAL.open(tmp_path / "plain", data), BY_SIGNAL.open(tmp_path / "elastic", data, pause_s=0.1)
    plain.run()
    for lines in (5, 12):
        elastic.interrupt(signal.SIGTERM, lines=lines, mark=": loss ")
        assert (elastic.checkpoints / "ckpt.pt").exists()
    elastic.run()
    seen = BY_SIGNAL.read_losses(elastic)
    assert_same_losses(seen, BY_SIGNAL.read_losses(plain), tolerance=BY_SIGNAL.tolerance)
