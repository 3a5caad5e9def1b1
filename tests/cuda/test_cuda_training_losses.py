"""Trainings of one rank on a GPU have the losses of the same trainings on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.training_loss_ranks import CASES
from tests.e2e.rank_launcher import RankLauncher, launch_ranks
from tests.e2e.rank_programs import run_on_ranks

PROGRAM = "tests.cuda.training_loss_ranks"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankLauncher]:
    """Fork ranks from one process with torch loaded, as the node agent does."""
    with launch_ranks(tmp_path_factory.mktemp("agent")) as started:
        yield started


def _needs_compiler(case: str) -> bool:
    """Return whether the case compiles kernels, for which Triton needs a C compiler."""
    return CASES[case].settings.compile_backend == "inductor"


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_cpu(launcher: RankLauncher, tmp_path: Path, case: str) -> None:
    if _needs_compiler(case) and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler, which Triton needs")
    [on_cpu] = run_on_ranks(launcher, PROGRAM, tmp_path / "cpu", "cpu", case, ranks=1)
    [on_gpu] = run_on_ranks(launcher, PROGRAM, tmp_path / "gpu", "cuda:0", case, ranks=1)
    log = (tmp_path / "gpu" / "log").read_text()
    assert on_gpu == pytest.approx(on_cpu, abs=CASES[case].tolerance), log[-3000:]
    assert on_gpu[-2] < on_gpu[0]
