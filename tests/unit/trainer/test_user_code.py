"""Datasets and evaluation hooks of the user's own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.trainer.model import SIZES
from scheduler.trainer.user_code import load_function, load_samples
from tests.unit.trainer.test_trainer import SETTINGS, _environment, _losses, _train

SIZE = SIZES["nano-gpt"]
CODE = """
import torch

class Numbers:
    def __init__(self, length, top):
        self.length, self.top = length, top
    def __len__(self):
        return 5
    def __getitem__(self, index):
        return (torch.arange(self.length) + index) % self.top

def build(sequence): return Numbers(sequence + 1, 64)
def held_out(sequence): return Numbers(sequence + 1, 32)
def short(sequence): return Numbers(sequence, 64)
def large(sequence): return [torch.full((sequence + 1,), 256)]
def nothing(sequence): return []
def record(step, loss):
    with open("evaluations", "a") as file: file.write(f"{step} {loss:.17g}\\n")
value = 3
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(CODE)
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_data", "needs_more"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_data", r"Write MODULE:FUNCTION"),
        ("no_such_data:build", r"no module 'no_such_data'"),
        ("own_data:built", r"own_data has no function 'built'"),
        ("own_data:value", r"own_data has no function 'value'"),
    ],
)
def test_function_that_does_not_exist_is_rejected_with_the_option(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"`--dataset` is '{name}'.*{problem}"):
        load_function("--dataset", name)


def test_error_inside_the_module_is_the_users_to_read() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_function("--dataset", "needs_more:build")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "returned list.*`__len__` above 0"),
        ("short", r"item \d has the shape \(64,\).*It must be 65"),
        ("large", r"item \d has token ids from 256 to 256.*accepts 0 to 255"),
    ],
)
def test_wrong_dataset_is_rejected_with_what_it_must_be(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_samples("--dataset", f"own_data:{name}", size=SIZE, seed=0).load_samples(range(2))


def test_training_reads_the_dataset_and_evaluates_without_a_change_of_the_training(tmp_path: Path) -> None:
    plain, evaluated = tmp_path / "plain", tmp_path / "evaluated"
    settings = replace(SETTINGS, dataset="own_data:build", dropout=0.2)
    _train(_environment(plain), replace(settings, ledger_dir=plain))
    evaluating = replace(settings, evaluate_every=2, evaluation_batches=2, ledger_dir=evaluated)
    hooks = replace(evaluating, evaluation_dataset="own_data:held_out", evaluation_hook="own_data:record")
    _train(_environment(evaluated), hooks)
    assert _losses(evaluated) == _losses(plain)
    seen = [line.split() for line in Path("evaluations").read_text().splitlines()]
    recorded = [json.loads(line) for line in (evaluated / "evaluations-g0.jsonl").read_text().splitlines()]
    assert [int(step) for step, _ in seen] == [line["step"] for line in recorded] == [2, 4]
    assert [float(loss) for _, loss in seen] == [line["loss"] for line in recorded]
    with pytest.raises(ValueError, match="its `dataset` is 'own_data:build'"):
        _train(_environment(plain), replace(SETTINGS, steps=6))
