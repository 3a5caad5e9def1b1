"""A generation of real ranks that is given what cannot be: it ends at once with one clear message, and what was saved
before stays as it was, good for the next generation."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.trainer.checkpoint_manifest import find_latest_manifest, list_checkpoint_steps
from tests.e2e.forked_ranks import Farm, Training, a_plan

pytestmark = pytest.mark.e2e

STEPS = 6
SAVED = 2
PLAN = a_plan((LayerStrategy(2, dp=2),), batch=4)
WIDER = a_plan((LayerStrategy(2, dp=4),), batch=4)


@pytest.fixture
def begun(ranks: Farm, tmp_path: Path) -> Training:
    """A training that has left after step `SAVED`, and told so."""
    training = Training(tmp_path / "training", "nano-gpt", STEPS)
    ranks.run(training, PLAN, until=SAVED)
    return replace(training, checkpoint_step=SAVED)


def test_a_plan_for_another_number_of_ranks(ranks: Farm, begun: Training) -> None:
    check_refused(ranks, begun, "ValueError: the plan is for 4 ranks, this generation has 2", plan=WIDER)
    check_goes_on(ranks, begun)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "nano-moe"}, "of another training: model is 'nano-gpt' there and 'nano-moe' here"),
        ({"options": ("--seed", "9")}, "of another training: seed is 0 there and 9 here"),
    ],
    ids=["model", "seed"],
)
def test_a_checkpoint_of_another_training(
    ranks: Farm, begun: Training, change: Mapping[str, str], message: str
) -> None:
    other = replace(begun, **change)  # type: ignore[arg-type]
    check_refused(ranks, other, f"CheckpointError: checkpoint {begun.checkpoints / 'step-00000002'} is {message}")
    check_goes_on(ranks, begun)


def test_a_checkpoint_directory_that_has_vanished(ranks: Farm, begun: Training) -> None:
    away = begun.root / "away"
    begun.checkpoints.rename(away)
    what = (
        f"CheckpointError: checkpoint directory {begun.checkpoints} does not exist, but this job has saved step 2 there"
    )
    check_refused(ranks, begun, f"{what}; bring it back, or submit a new job to begin again")
    assert not begun.checkpoints.exists(), "it did not come back empty"
    away.rename(begun.checkpoints)
    check_goes_on(ranks, begun)


def test_a_checkpoint_directory_whose_checkpoints_have_vanished(ranks: Farm, begun: Training) -> None:
    away = begun.root / "away"
    (begun.checkpoints / "step-00000002").rename(away)
    what = f"checkpoint directory {begun.checkpoints} holds no complete checkpoint, but this job has saved step 2 there"
    check_refused(ranks, begun, f"CheckpointError: {what}; bring it back, or submit a new job to begin again")
    away.rename(begun.checkpoints / "step-00000002")
    check_goes_on(ranks, begun)


def test_a_checkpoint_directory_that_is_read_only(ranks: Farm, begun: Training) -> None:
    with a_disk(begun.root / "disk", size_kb=65536) as disk:
        moved = replace(begun, checkpoint_dir=disk / "checkpoints")
        subprocess.run(["cp", "-a", str(begun.checkpoints), str(disk)], check=True)
        remount(disk, "ro")
        what = f"checkpoint directory {moved.checkpoints} cannot be written: Read-only file system"
        check_refused(ranks, moved, f"CheckpointError: {what}")
        remount(disk, "rw")
        check_goes_on(ranks, moved)


def test_a_checkpoint_directory_that_is_full(ranks: Farm, begun: Training) -> None:
    """Room for one checkpoint and a half: the next one does not fit beside the one that counts."""
    used_kb = sum(path.stat().st_size for path in begun.checkpoints.rglob("*")) // 1024
    with a_disk(begun.root / "disk", size_kb=used_kb * 3 // 2) as disk:
        moved = replace(begun, checkpoint_dir=disk / "checkpoints")
        subprocess.run(["cp", "-a", str(begun.checkpoints), str(disk)], check=True)
        reason = ranks.fail(moved, PLAN)
        assert reason.startswith(
            f"CheckpointError: checkpoint {moved.checkpoints / 'step-00000006'} could not be saved"
        )
        assert "No space left on device" in reason
        found = find_latest_manifest(moved.checkpoints)
        assert found is not None
        assert found.position.step == SAVED
        remount(disk, f"rw,size={used_kb * 8}k")
        check_goes_on(ranks, moved)


def check_refused(ranks: Farm, training: Training, message: str, *, plan: ParallelPlan = PLAN) -> None:
    """No step is made and no file of a checkpoint changes."""
    before = contents(training.checkpoints)
    made = len(training.lines("losses-*"))
    assert ranks.fail(training, plan, ranks=PLAN.world_size) == message
    assert contents(training.checkpoints) == before
    assert len(training.lines("losses-*")) == made


def check_goes_on(ranks: Farm, training: Training) -> None:
    """Once it is given what it needs, from where it was."""
    ranks.run(training, PLAN)
    assert training.first_steps()[ranks.generation] == SAVED + 1
    assert list_checkpoint_steps(training.checkpoints)[0] == STEPS


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def a_disk(folder: Path, *, size_kb: int) -> Iterator[Path]:
    """A small file system in memory. Only root may mount one, and not in every container."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here, as user {os.getuid()}: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
