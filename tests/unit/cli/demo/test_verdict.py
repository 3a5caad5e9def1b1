"""The demo's verdict cannot be kept by a story that did not happen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.demo.checks import EXPECTED_EVENTS, TrainingRun, check_events, check_leftover_processes, check_training
from cli.demo.scenario import load_demand_trace


def an_event(code: str, **numbers: float) -> dict[str, Any]:
    return {"code": code, "message": "", "numbers": numbers}


WHOLE_STORY = [
    an_event(code, **({"early_s": 3.0} if code == "NodeReturned" else {})) for code in EXPECTED_EVENTS.values()
]


def kept(findings: Any) -> bool:
    return all(finding.kept for finding in findings)


def test_a_whole_story_is_kept() -> None:
    assert kept(check_events(WHOLE_STORY))


@pytest.mark.parametrize("missing", range(len(EXPECTED_EVENTS)))
def test_a_missing_turn_is_found(missing: int) -> None:
    assert not kept(check_events(WHOLE_STORY[:missing] + WHOLE_STORY[missing + 1 :]))


@pytest.mark.parametrize(
    "event",
    [
        {"code": "Breach", "message": "recall-late: i0 is 2.0 s late", "numbers": {}},
        an_event("NodeReturned", early_s=-1.0),
        an_event("DecisionDropped"),
    ],
)
def test_a_late_return_or_an_illegal_decision_is_found(event: dict[str, Any]) -> None:
    assert not kept(check_events([*WHOLE_STORY, event]))


def test_a_process_that_is_left_is_found() -> None:
    assert check_leftover_processes([]).passed
    assert not check_leftover_processes([42]).passed


def a_training(
    folder: Path, *, loss: float = 1.0, samples: tuple[int, ...] = (3, 4), again: bool = False
) -> TrainingRun:
    for name, value, seen in (("ledger", loss, samples), ("reference", 1.0, (3, 4))):
        (folder / name).mkdir()
        (folder / name / "losses-g1.jsonl").write_text(json.dumps({"step": 1, "loss": value}) + "\n")
        line = json.dumps({"step": 1, "samples": seen}) + "\n"
        (folder / name / "samples-g1-r0.jsonl").write_text(line * (2 if again and name == "ledger" else 1))
    return TrainingRun("job", 1, 2, folder / "ledger", folder / "reference")


def test_equal_losses_and_samples_are_kept(tmp_path: Path) -> None:
    assert kept(check_training(a_training(tmp_path)))


@pytest.mark.parametrize("fault", [{"loss": 1.001}, {"samples": (3, 5)}, {"samples": (3,)}, {"again": True}])
def test_a_wrong_loss_and_a_lost_or_doubled_sample_are_found(tmp_path: Path, fault: dict[str, Any]) -> None:
    assert not kept(check_training(a_training(tmp_path, **fault)))


def test_the_tide_is_eight_real_days_in_the_demos_time() -> None:
    tide = load_demand_trace(day_s=170.0, peak_gpus=1.6)
    assert (len(tide.history), len(tide.today)) == (7 * 144, 144)
    assert tide.history[0].at_s == pytest.approx(-7 * 170.0)
    assert max(reading.gpus for reading in (*tide.history, *tide.today)) == pytest.approx(1.6)
    assert min(reading.gpus for reading in tide.today) > 0.3, "missing data is not quiet"
