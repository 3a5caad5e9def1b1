"""Golden scenarios: each file holds a story in words and the events that it must lead to.

Rewrite the expectations after an intended change with EBBTIDE_GOLDEN=write, and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.golden.stage import Stage

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
RULE = "=" * 40


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    story, _, expected = path.read_text().partition(RULE + "\n")
    stage = Stage()
    for line in story.splitlines():
        if line.strip() and not line.startswith("#"):
            stage.play(line)
    told = "\n".join(stage.told) + "\n"
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        path.write_text(story + RULE + "\n" + told)
    else:
        assert told == expected


def test_every_scenario_of_the_list_exists() -> None:
    wanted = {
        "lend", "grow", "recall", "shrink", "preempt", "cancel_recall",
        "node_loss", "late_save", "infeasible_job", "api_burst",
    }  # fmt: skip
    assert wanted <= {path.stem for path in SCENARIOS}
