"""How loops of `ebbtide.elastic` end: by exhaustion, `break`, a notice or an error, with and without a `with` block."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ebbtide
from ebbtide.elastic_run import ElasticRun
from ebbtide.reproducible_draws import list_wrapped_modules

BeginRun = Callable[[int], Path]
"""Creates the run directory of a generation and returns it."""


def _open(folder: Path | None = None, **keywords: Any) -> tuple[ElasticRun, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss: torch.Tensor = model(torch.ones(1)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return ebbtide.elastic(model, optimizer, folder=folder, **keywords), optimizer


def _loader(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=2)


def test_step_before_a_break_is_counted_and_saved(tmp_path: Path) -> None:
    opened, optimizer = _open(tmp_path)
    with opened as run:
        for step in run.steps(7):
            optimizer.step()
            if step == 6:
                break
    assert run.step == 7
    assert (tmp_path / "step-7").is_dir()


def test_break_before_the_optimizer_steps_counts_no_step(tmp_path: Path) -> None:
    opened, _ = _open(tmp_path)
    with opened as run:
        for _ in run.steps(7):
            break
    assert (run.step, list(tmp_path.iterdir())) == (0, [])


def test_break_out_of_an_epoch_counts_its_last_step(tmp_path: Path) -> None:
    opened, optimizer = _open(tmp_path, dataloader=_loader())
    with opened as run:
        for _ in run.epochs(2):
            for number, _ in enumerate(run):
                optimizer.step()
                if number == 2:
                    break
    assert (run.step, run.epoch) == (6, 2)


def test_second_pass_over_a_run_without_epochs_left_is_refused(tmp_path: Path) -> None:
    opened, _ = _open(tmp_path, dataloader=_loader())
    batches = 0

    def train() -> None:
        nonlocal batches
        with opened as run:
            for _ in range(3):
                for _ in run:
                    batches += 1

    with pytest.raises(ValueError, match=r"run\.epochs\(N\)"):
        train()
    assert batches == 4


def test_second_pass_in_an_epoch_is_refused() -> None:
    opened, _ = _open(dataloader=_loader())

    def train() -> None:
        with opened as run:
            for _ in run.epochs(2):
                list(run)
                list(run)

    with pytest.raises(ValueError, match=r"no batches left"):
        train()


@pytest.fixture
def begin_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BeginRun:
    def begin(generation: int) -> Path:
        run_dir = tmp_path / f"run-{generation}"
        run_dir.mkdir()
        monkeypatch.setenv("EBBTIDE_RUN_DIR", str(run_dir))
        monkeypatch.setenv("EBBTIDE_GENERATION", str(generation))
        return run_dir

    return begin


def test_fall_back_from_non_finite_losses_works_in_a_folder_of_its_own(
    tmp_path: Path, begin_run: BeginRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBTIDE_CHECKPOINT_DIR", str(tmp_path / "job"))
    folder = tmp_path / "own"
    starts = []
    for generation in range(1, 6):
        begin_run(generation)
        opened, _ = _open(folder)
        with opened as run:
            starts.append(run.step)
            for _ in run.steps(1 if generation == 1 else 2 if generation == 2 else 3):
                run.report(loss=math.nan if generation > 2 else 1.0)
                if generation > 2:
                    run._finish_step()
                    run.session.leave()
                    break
    assert starts == [0, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("last", "calls_finish", "phase", "step"),
    [(4, False, "succeeded", 4), (3, True, "succeeded", 3), (3, False, "failed", 2), (0, False, "failed", 0)],
)
def test_loop_without_a_block_reports_how_it_ended(
    tmp_path: Path, begin_run: BeginRun, last: int, calls_finish: bool, phase: str, step: int
) -> None:
    run_dir, folder = begin_run(1), tmp_path / "checkpoints"
    run, optimizer = _open(folder)
    for _ in run.steps(4):
        if run.step == last:
            break
        optimizer.step()
        if run.step + 1 == last < 4:
            break
    if calls_finish:
        run.finish()
    run._report_exit()  # as at the end of the process
    run._close_end()
    status = json.loads((run_dir / "status-0.json").read_text())
    assert (status["phase"], status["step"]) == (phase, step)
    assert [path.name for path in folder.glob("*")] == ([f"step-{step}"] if phase == "succeeded" else [])


def test_uncaught_exception_of_a_loop_without_a_block_is_reported(
    tmp_path: Path, begin_run: BeginRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = begin_run(1)
    shown = list[BaseException]()
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))
    before = sys.excepthook
    run, _ = _open(tmp_path / "checkpoints")
    error = RuntimeError("broken")
    sys.excepthook(RuntimeError, error, None)
    run._report_exit()
    run._close_end()
    assert (shown, sys.excepthook) == ([error], before)
    status = json.loads((run_dir / "status-0.json").read_text())
    assert (status["phase"], status["reason"]) == ("failed", "RuntimeError: broken")


FLAT_SCRIPT = """
    import os, sys, torch, ebbtide

    def train(words):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run = ebbtide.elastic(model, optimizer)
        for step in run.steps(4):
            model(torch.rand(1)).backward()
            optimizer.step()
            if step == 3 and "break" in words:
                break
            if step == 2 and "error" in words:
                raise RuntimeError("broken")
            if "exit" in words:
                sys.exit(1)
        if "finish" in words:
            run.finish()

    train("exhausted-and-finish")  # loads modules once, for all cases
    for case in sys.argv[1:]:
        os.environ.update(EBBTIDE_RUN_DIR=case, EBBTIDE_CHECKPOINT_DIR=f"{case}/checkpoints")
        if not os.fork():
            train(os.path.basename(case))
            break
        os.wait()
"""
ENDS = {
    "exhausted": ("succeeded", 4, ["step-4"]),
    "break-and-finish": ("succeeded", 4, ["step-4"]),
    "break": ("failed", 3, []),
    "error": ("failed", 2, []),
    "exit": ("failed", 0, []),
}


@pytest.mark.full
def test_process_with_a_loop_without_a_block_reports_how_it_ended(tmp_path: Path) -> None:
    for case in ENDS:
        (tmp_path / case).mkdir()
    command = [sys.executable, "-c", dedent(FLAT_SCRIPT), *(str(tmp_path / case) for case in ENDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {}
    for case in ENDS:
        status = json.loads((tmp_path / case / "status-0.json").read_text())
        checkpoints = [path.name for path in (tmp_path / case).glob("checkpoints/*")]
        found[case] = (status["phase"], status["step"], checkpoints)
    assert found == ENDS, done.stderr
    assert done.stderr.count("without run.finish()") == 2


def test_finishing_twice_does_nothing_more(tmp_path: Path) -> None:
    opened, optimizer = _open(tmp_path)
    with opened as run:
        for _ in run.steps(1):
            optimizer.step()
        run.finish()
        optimizer.step()
    assert run.step == 1


def test_draw_without_global_random_numbers_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    run, _ = _open()

    def draw_privately() -> torch.Tensor:
        return torch.rand(1, generator=generator)

    draw = run.reproducible(draw_privately)
    with pytest.raises(ValueError, match=r"torch\.Generator"):
        draw()
    run.finish()


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


def test_evaluation_mode_of_a_wrapped_module_does_not_count_as_training() -> None:
    inner, other = nn.Linear(1, 1), nn.Linear(1, 1)
    wrapper = Wrapper(inner)
    assert list_wrapped_modules(nn.ModuleList([wrapper, other]))[1:] == [wrapper, inner, other]
    run = ebbtide.elastic(wrapper, torch.optim.SGD(wrapper.parameters()))

    def draw_number() -> float:
        return float(torch.rand(()))

    draw = run.reproducible(draw_number)
    inner.eval()
    evaluated = draw()
    inner.train()
    first, second = draw(), draw()
    assert len({evaluated, first, second}) == 3
    assert run._sampler is not None
    assert run._sampler.position == 2
    run.finish()
