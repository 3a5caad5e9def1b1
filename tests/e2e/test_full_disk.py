"""An error that only rank 0 meets while saving is raised on all ranks.

Otherwise some would leave and others save again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.trainer.checkpoint_manifest import checkpoint_path, iterate_complete_checkpoints
from tests.e2e.full_disk_ranks import ROOT
from tests.e2e.rank_launcher import RankLauncher
from tests.e2e.rank_programs import run_on_ranks

pytestmark = pytest.mark.e2e


def test_unwritable_manifest_fails_the_save_on_every_rank(ranks: RankLauncher, tmp_path: Path) -> None:
    errors_by_rank = run_on_ranks(ranks, "tests.e2e.full_disk_ranks", tmp_path, ranks=2)
    for errors in errors_by_rank:
        assert [bool(error) for error in errors] == [False, True, True, False]
        for step, error in zip((2, 3), errors[1:3], strict=True):
            assert str(checkpoint_path(tmp_path / ROOT, step)) in error
            assert "No space left on device" in error
    assert [manifest.position.step for manifest in iterate_complete_checkpoints(tmp_path / ROOT)] == [4, 1]
