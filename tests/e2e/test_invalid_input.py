"""A generation of real ranks with invalid input fails with one clear message and changes no checkpoint."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.trainer.checkpoint_manifest import find_latest_manifest, list_checkpoint_steps
from tests.e2e.rank_launcher import RankLauncher, Training, make_plan
from tests.small_disk import small_disk

pytestmark = pytest.mark.e2e

STEPS = 6
SAVED = 2
PLAN = make_plan((LayerStrategy(2, dp=2),), batch=4)
WIDER = make_plan((LayerStrategy(2, dp=4),), batch=4)


@pytest.fixture
def begun(ranks: RankLauncher, tmp_path: Path) -> Training:
    """A training that has saved step `SAVED`, left, and reported the checkpoint."""
    training = Training(tmp_path / "training", "nano-gpt", STEPS)
    ranks.run(training, PLAN, until=SAVED)
    return replace(training, checkpoint_step=SAVED)


def test_plan_for_another_number_of_ranks_is_rejected(ranks: RankLauncher, begun: Training) -> None:
    check_rejected(ranks, begun, "ValueError", "4 ranks", "has 2", plan=WIDER)
    check_continues(ranks, begun)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "nano-moe"}, ("`model` is 'nano-gpt'", "'nano-moe'")),
        ({"options": ("--seed", "9")}, ("`seed` is 0", "has 9")),
    ],
    ids=["model", "seed"],
)
def test_checkpoint_of_another_training_is_rejected(
    ranks: RankLauncher, begun: Training, change: Mapping[str, str], problem: tuple[str, ...]
) -> None:
    other = replace(begun, **change)  # type: ignore[arg-type]
    check_rejected(ranks, other, "CheckpointError", str(begun.checkpoints / "step-00000002"), *problem)
    check_continues(ranks, begun)


def test_missing_checkpoint_directory_is_rejected(ranks: RankLauncher, begun: Training) -> None:
    away = begun.root / "away"
    begun.checkpoints.rename(away)
    check_rejected(ranks, begun, "CheckpointError", f"{begun.checkpoints} does not exist", "step 2")
    assert not begun.checkpoints.exists(), "the directory must not come back empty"
    away.rename(begun.checkpoints)
    check_continues(ranks, begun)


def test_checkpoint_directory_without_its_checkpoints_is_rejected(ranks: RankLauncher, begun: Training) -> None:
    away = begun.root / "away"
    (begun.checkpoints / "step-00000002").rename(away)
    check_rejected(ranks, begun, "CheckpointError", f"{begun.checkpoints} contains no complete checkpoint", "step 2")
    away.rename(begun.checkpoints / "step-00000002")
    check_continues(ranks, begun)


def test_read_only_checkpoint_directory_is_rejected(ranks: RankLauncher, begun: Training) -> None:
    with small_disk(begun.root / "disk", size_kb=65536) as disk:
        moved = replace(begun, checkpoint_dir=disk / "checkpoints")
        subprocess.run(["cp", "-a", str(begun.checkpoints), str(disk)], check=True)
        remount(disk, "ro")
        check_rejected(ranks, moved, "CheckpointError", f"{moved.checkpoints}: Read-only file system")
        remount(disk, "rw")
        check_continues(ranks, moved)


def test_full_disk_fails_the_save_and_keeps_the_checkpoint(ranks: RankLauncher, begun: Training) -> None:
    """The disk has space for one checkpoint and a half, so the next one does not fit beside the complete one."""
    used_kb = sum(path.stat().st_size for path in begun.checkpoints.rglob("*")) // 1024
    with small_disk(begun.root / "disk", size_kb=used_kb * 3 // 2) as disk:
        moved = replace(begun, checkpoint_dir=disk / "checkpoints")
        subprocess.run(["cp", "-a", str(begun.checkpoints), str(disk)], check=True)
        reason = ranks.fail(moved, PLAN)
        assert reason.startswith("CheckpointError: ")
        assert str(moved.checkpoints / "step-00000006") in reason
        assert "No space left on device" in reason
        manifest = find_latest_manifest(moved.checkpoints)
        assert manifest is not None
        assert manifest.position.step == SAVED
        remount(disk, f"rw,size={used_kb * 8}k")
        check_continues(ranks, moved)


def check_rejected(ranks: RankLauncher, training: Training, *problem: str, plan: ParallelPlan = PLAN) -> None:
    """Check that the generation fails with these texts, makes no step and changes no file of a checkpoint."""
    before = contents(training.checkpoints)
    steps = len(training.lines("losses-*"))
    reason = ranks.fail(training, plan, ranks=PLAN.world_size)
    assert [text for text in problem if text not in reason] == [], reason
    assert contents(training.checkpoints) == before
    assert len(training.lines("losses-*")) == steps


def check_continues(ranks: RankLauncher, training: Training) -> None:
    """Check that training continues from the checkpoint once the input is valid."""
    ranks.run(training, PLAN)
    assert training.first_steps()[ranks.generation] == SAVED + 1
    assert list_checkpoint_steps(training.checkpoints)[0] == STEPS


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
