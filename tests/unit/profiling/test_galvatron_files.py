"""Measurements in Galvatron's files, which our own reader takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from baselines.galvatron.profile_reader import read_case
from scheduler.profiling.galvatron_files import build_galvatron_files
from scheduler.profiling.layer_figures import compute_activation_bytes, compute_layer_figures
from scheduler.profiling.task_lists import ACCELERATOR, list_collective_tasks, list_probe_tasks
from scheduler.profiling.tasks import GptShape, StepTask, Task
from scheduler.solver.profiles.catalog import load_gpu
from tests.unit.profiling.simulated_device import describe, measure

HARDWARE = replace(load_gpu("h100-80g"), launch_s=0.0)
RANKS = 4
FIGURES = measure(
    [*list_collective_tasks(ACCELERATOR, RANKS), *list_probe_tasks(ACCELERATOR, RANKS)], HARDWARE, ranks=RANKS
)


def test_the_reader_takes_the_files(tmp_path: Path) -> None:
    files = build_galvatron_files(describe(HARDWARE, ranks=RANKS), FIGURES, HARDWARE, ACCELERATOR.model)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    case = read_case(tmp_path)
    assert (case.model.layers, case.model.hidden, case.cluster.gpus) == (16, 2048, RANKS)
    assert case.cluster.overlap == HARDWARE.overlap_coefficient
    assert set(case.cluster.neighbour_ms_per_mb) == {2, 4}
    assert case.model.layer_forward_ms.evaluate(4) > case.model.layer_forward_ms.evaluate(1) > 0
    assert case.model.activation_mb[1] > case.model.activation_mb[4]


def test_layers_are_measured_over_micro_batch_tensor_degree_and_sequence() -> None:
    layers = compute_layer_figures(FIGURES)
    assert {each.tensor for each in layers} == {1, 2, 4}
    assert len({each.micro_batch for each in layers}) >= 3
    assert {each.shape.sequence for each in layers} >= {1024, 2048, 4096}
    assert all(each.forward_s > 0 and each.backward_s > 0 for each in layers)


def test_activations_of_a_layer_are_measured() -> None:
    kept = compute_activation_bytes(FIGURES)
    shape = next(each for each in kept if (each.hidden, each.sequence) == (2048, 2048))
    assert kept[shape] == pytest.approx(36 * 2048 * 2048, rel=0.1)


def test_a_model_whose_layer_was_not_measured_is_refused() -> None:
    other = GptShape(layers=2, hidden=512, heads=8, vocabulary=1024, sequence=2048)
    with pytest.raises(ValueError, match="512"):
        build_galvatron_files(describe(HARDWARE, ranks=RANKS), FIGURES, HARDWARE, other)


def test_validation_steps_are_no_layers() -> None:
    renamed: dict[Task, Mapping[str, float]] = {
        replace(task, purpose="validation"): values for task, values in FIGURES.items() if isinstance(task, StepTask)
    }
    assert compute_layer_figures(renamed) == []
    assert compute_activation_bytes(renamed) == {}
