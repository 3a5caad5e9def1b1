"""The integration with torchtitan, as far as it runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.framework_trainings import PYTHON, REPOSITORY, count_added_lines, has_frameworks
from tests.loopback import find_free_port

CHECKS = REPOSITORY / "tests" / "e2e" / "torchtitan_checks.py"
EXAMPLE = REPOSITORY / "examples" / "torchtitan" / "elastic_llama.py"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(not has_frameworks(), reason="no training frameworks: run `make frameworks`"),
]


def _run(*words: str, **variables: str) -> None:
    done = subprocess.run(
        [str(PYTHON), str(CHECKS), *words], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_torchtitan_parses_the_example_and_samples_keep_their_positions() -> None:
    _run("components")


def test_a_notice_saves_and_the_next_generation_continues(tmp_path: Path) -> None:
    for generation in ("1", "2"):
        run_dir = tmp_path / generation
        run_dir.mkdir()
        if generation == "1":
            (run_dir / "notice.json").write_text('{"action": "leave", "step": 3, "seconds_left": 60}')
        ebbtide = {"EBBTIDE_GENERATION": generation, "EBBTIDE_RUN_DIR": str(run_dir)}
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
        _run(str(tmp_path), **ranks, **ebbtide, EBBTIDE_CHECKPOINT_DIR=str(tmp_path / "checkpoints"))
    statuses = [json.loads((tmp_path / generation / "status-0.json").read_text()) for generation in ("1", "2")]
    assert [(status["phase"], status["step"]) for status in statuses] == [("left", 3), ("succeeded", 6)]
    assert json.loads((tmp_path / "first-2").read_text()) == [3, [3.0, 3.0, 3.0, 3.0]]


def test_the_example_needs_few_added_lines() -> None:
    assert 0 < count_added_lines(EXAMPLE) <= 2
