"""The integration with torchtitan, as far as it runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.framework_probes import LONG_WITH_FRAMEWORKS, flip_bit
from tests.e2e.framework_trainings import PYTHON, REPOSITORY, count_added_lines
from tests.loopback import find_free_port

CHECKS = REPOSITORY / "tests" / "e2e" / "torchtitan_checks.py"
EXAMPLE = REPOSITORY / "examples" / "torchtitan" / "elastic_llama.py"

pytestmark = LONG_WITH_FRAMEWORKS


def _run(*words: str, **variables: str) -> None:
    done = subprocess.run(
        [str(PYTHON), str(CHECKS), *words], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_torchtitan_parses_the_example_and_samples_keep_their_positions() -> None:
    _run("components")


def _train(root: Path, generation: int, *, until: int = 0, mode: str = "disabled") -> dict[str, Any]:
    """Run one generation, which leaves after step `until`, and return its status."""
    run_dir = root / str(generation)
    run_dir.mkdir()
    if until:
        (run_dir / "notice.json").write_text(json.dumps({"action": "leave", "step": until, "seconds_left": 60}))
    ebbtide = {"EBBTIDE_GENERATION": str(generation), "EBBTIDE_RUN_DIR": str(run_dir)}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    _run(str(root), mode, **ranks, **ebbtide, EBBTIDE_CHECKPOINT_DIR=str(root / "checkpoints"))
    status: dict[str, Any] = json.loads((run_dir / "status-0.json").read_text())
    return status


def test_a_notice_saves_and_the_next_generation_continues(tmp_path: Path) -> None:
    statuses = [_train(tmp_path, 1, until=3), _train(tmp_path, 2)]
    assert [(status["phase"], status["step"]) for status in statuses] == [("left", 3), ("succeeded", 6)]
    assert json.loads((tmp_path / "first-2").read_text()) == [3, [3.0, 3.0, 3.0, 3.0]]


@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata"])
def test_a_flipped_bit_leads_to_the_previous_checkpoint(tmp_path: Path, pattern: str) -> None:
    for generation, step in enumerate((3, 5), start=1):
        _train(tmp_path, generation, until=step)
    checkpoints = tmp_path / "checkpoints" / "out" / "checkpoint"
    (file,) = (checkpoints / "step-5").glob(pattern)
    flip_bit(file)
    assert _train(tmp_path, 3)["step"] == 6
    assert json.loads((tmp_path / "first-3").read_text()) == [4, [4.0, 4.0, 4.0, 4.0]]
    assert (checkpoints / "damaged-5").is_dir()


def test_checkpoints_that_are_written_in_the_background_get_checksums(tmp_path: Path) -> None:
    assert _train(tmp_path, 1, mode="async")["checkpoint_step"] == 6
    checkpoints = (tmp_path / "checkpoints" / "out" / "checkpoint").iterdir()
    assert {path.name: (path / "ebbtide.json").exists() for path in checkpoints} == {
        "step-2": True,
        "step-4": True,
        "step-6": True,
    }


def test_the_example_needs_few_added_lines() -> None:
    assert 0 < count_added_lines(EXAMPLE) <= 2
