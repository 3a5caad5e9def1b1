"""The end of a script decides whether its training succeeded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.domain.observation import RunPhase
from scheduler.executors.rank_status import read_rank_status
from scheduler.executors.run_outcome import RankView, classify_outcome, describe_fault, find_faulty_ranks

SCRIPT = """
import sys
from ebbtide.integrations.framework_session import FrameworkSession
run = FrameworkSession()
run.session.mark_resumed(0)
run.end_step(1)
{end}
"""


@pytest.mark.parametrize(
    ("end", "phase"),
    [
        ("run.finish()", RunPhase.SUCCEEDED),
        ("run.finish(); sys.exit(0)", RunPhase.SUCCEEDED),
        ("run.finish(); sys.exit('no validation data')", RunPhase.FAILED),
        ("run.finish(); raise SystemExit(3)", RunPhase.FAILED),
        ("run.finish(); raise ValueError('bad')", RunPhase.FAILED),
        ("pass", RunPhase.FAILED),
    ],
)
def test_a_finished_training_succeeds_unless_its_script_fails(tmp_path: Path, end: str, phase: RunPhase) -> None:
    environment = {**os.environ, "EBBTIDE_RUN_DIR": str(tmp_path), "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(end=end)], env=environment, stderr=subprocess.PIPE)
    rank = RankView(0, read_rank_status(tmp_path / "status-0.json"), done.returncode)
    blamed = find_faulty_ranks([rank], terminated=False)
    fault = describe_fault(blamed[0], "") if blamed else ""
    assert classify_outcome([rank], fault=fault, killed_because="", terminated=False).phase is phase, done.stderr
