"""Golden scenarios: each file has a scenario in words and the events that it must produce.

After an intended change, rewrite the expected events with EBBTIDE_GOLDEN=write, and review the diff.
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
    scenario, _, expected = path.read_text().partition(RULE + "\n")
    stage = Stage()
    for line in scenario.splitlines():
        if line.strip() and not line.startswith("#"):
            stage.play(line)
    events = "\n".join(stage.output) + "\n"
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        path.write_text(scenario + RULE + "\n" + events)
    else:
        assert events == expected


def test_required_scenarios_exist() -> None:
    required = {
        "lend", "grow", "recall", "shrink", "preempt", "cancel_recall",
        "node_loss", "late_save", "infeasible_job", "api_burst",
    }  # fmt: skip
    assert required <= {path.stem for path in SCENARIOS}
