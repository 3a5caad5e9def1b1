"""The examples of the framework integrations, over 1, 2, 4, 2 and 1 ranks, train as on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.framework_trainings import (
    REPOSITORY,
    ElasticTraining,
    FrameworkRanks,
    count_added_lines,
    has_frameworks,
    launch_frameworks,
    read_history,
)

EXAMPLES = REPOSITORY / "examples"
GENERATIONS = ((1, 3), (2, 7), (4, 13), (2, 17), (1, 0))
"""Ranks of each generation, and the first step after which it may leave. An epoch ends after step 13."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_frameworks(), reason="no training frameworks: run `make frameworks`"),
]


def _read_trainer_losses(training: ElasticTraining) -> dict[int, float]:
    return read_history(training.root / "checkpoints" / "out")


@dataclass(frozen=True, slots=True)
class Example:
    """An example script. `modules` are loaded once for all its ranks."""

    name: str
    modules: tuple[str, ...]
    steps: int
    added_lines_max: int
    options: tuple[str, ...] = ()
    read_losses: Callable[[ElasticTraining], dict[int, float]] = ElasticTraining.losses

    @property
    def script(self) -> Path:
        return EXAMPLES / self.name / "train.py"


TRAINER_OPTIONS = (
    *("--output_dir", "out", "--max_steps", "40", "--per_device_train_batch_size", "8", "--save_strategy", "no"),
    *("--gradient_accumulation_steps", "2", "--learning_rate", "0.02", "--lr_scheduler_type", "constant"),
    *("--logging_steps", "1", "--report_to", "none", "--use_cpu", "--disable_tqdm", "True"),
)
ACCELERATE = Example("accelerate", ("accelerate",), 52, 3, ("--epochs", "4"))
LIGHTNING = Example("lightning", ("lightning.pytorch",), 52, 5, ("--epochs", "4"))
TRAINER = Example(
    "transformers",
    ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    40,
    3,
    TRAINER_OPTIONS,
    _read_trainer_losses,
)


@pytest.fixture
def ranks(example: Example) -> Iterator[FrameworkRanks]:
    with launch_frameworks(*example.modules) as launched:
        yield launched


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(ACCELERATE, id="accelerate"),
        pytest.param(LIGHTNING, id="lightning", marks=pytest.mark.full),
        pytest.param(TRAINER, id="transformers", marks=pytest.mark.full),
    ],
)
def test_resized_training_has_the_losses_of_an_uninterrupted_one(
    ranks: FrameworkRanks, tmp_path: Path, example: Example
) -> None:
    plain = ElasticTraining(ranks, tmp_path / "plain", example.script, example.options)
    plain.run(1)
    elastic = ElasticTraining(ranks, tmp_path / "elastic", example.script, example.options)
    for world_size, until in GENERATIONS:
        elastic.run(world_size, until=until and max(until, elastic.step + 2))
    _check_statuses(elastic, example.steps)
    seen, reference = example.read_losses(elastic), example.read_losses(plain)
    assert sorted(seen) == list(range(1, example.steps + 1)) == sorted(reference)
    assert max(abs(seen[step] - reference[step]) for step in seen) <= 1e-4
    assert seen[example.steps] <= 0.7 * seen[1]


def _check_statuses(training: ElasticTraining, steps: int) -> None:
    phases = [{status["phase"] for status in statuses} for statuses in training.statuses]
    assert phases == [{"left"}, {"left"}, {"left"}, {"left"}, {"succeeded"}], training.logs()
    assert all(len({status["step"] for status in statuses}) == 1 for statuses in training.statuses)
    *left, last = [statuses[0] for statuses in training.statuses]
    assert last["step"] == steps
    for status, (_, until) in zip(left, GENERATIONS, strict=False):
        assert until <= status["step"] == status["checkpoint_step"] < steps


@pytest.mark.parametrize("example", [TRAINER, ACCELERATE, LIGHTNING], ids=lambda example: example.name)
def test_an_example_needs_few_added_lines(example: Example) -> None:
    assert 0 < count_added_lines(example.script) <= example.added_lines_max
