"""What only rank 0 can see of a save, all ranks hear: else one would leave as saved while another saved once more."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.trainer.checkpoint_manifest import checkpoint_path, iterate_complete_checkpoints
from tests.e2e.forked_ranks import Farm
from tests.e2e.full_disk_ranks import ROOT
from tests.e2e.rank_programs import found_by_ranks

pytestmark = pytest.mark.e2e


def test_a_manifest_that_cannot_be_written_fails_the_save_on_every_rank(ranks: Farm, tmp_path: Path) -> None:
    found = found_by_ranks(ranks, "tests.e2e.full_disk_ranks", tmp_path, ranks=2)
    failed = [
        f"checkpoint {checkpoint_path(tmp_path / ROOT, step)} could not be saved: No space left on device"
        for step in (2, 3)
    ]
    assert found == 2 * [["it went well", *failed, "it went well"]]
    assert [manifest.position.step for manifest in iterate_complete_checkpoints(tmp_path / ROOT)] == [4, 1]
