"""A slowed rank is found, although all ranks take the same time for a step. Real processes on gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.domain.observation import Straggler
from scheduler.executors.rank_status import read_rank_status
from scheduler.executors.stragglers import find_straggler
from tests.loopback import find_free_port

RANK = Path(__file__).with_name("straggling_rank.py")
SECONDS = 4.0


@pytest.mark.parametrize("slow_rank", [1, pytest.param(-1, marks=pytest.mark.full)])
def test_only_a_slowed_rank_is_a_straggler(tmp_path: Path, slow_rank: int) -> None:
    straggler = run_ranks(tmp_path, slow_rank)
    if slow_rank < 0:
        assert straggler is None
    else:
        assert straggler is not None
        assert (straggler.rank, straggler.node) == (slow_rank, f"n{slow_rank}")


def run_ranks(folder: Path, slow_rank: int) -> Straggler | None:
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    common |= {"EBBTIDE_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RANK), str(slow_rank), str(SECONDS)]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(90.0) for process in ranks] == [0, 0]
    statuses = {rank: read_rank_status(folder / f"status-{rank}.json") for rank in range(2)}
    probes = {rank: status.probe_s for rank, status in statuses.items() if status is not None and status.probe_s}
    assert len(probes) == 2
    return find_straggler(probes, ["n0", "n1"])
