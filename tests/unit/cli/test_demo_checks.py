"""Checks of the demo fail if an expected event, loss or sample is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.demo.checks import EXPECTED_EVENTS, TrainingRun, check_events, check_leftover_processes, check_training
from cli.demo.scenario import load_demand_trace


def make_event(code: str, **numbers: float) -> dict[str, Any]:
    return {"code": code, "message": "", "numbers": numbers}


COMPLETE_RUN = [
    make_event(code, **({"early_s": 3.0} if code == "NodeReturned" else {})) for code in EXPECTED_EVENTS.values()
]


def all_passed(results: Any) -> bool:
    return all(result.passed for result in results)


def test_complete_run_passes() -> None:
    assert all_passed(check_events(COMPLETE_RUN))


@pytest.mark.parametrize("missing", range(len(EXPECTED_EVENTS)))
def test_missing_event_fails(missing: int) -> None:
    assert not all_passed(check_events(COMPLETE_RUN[:missing] + COMPLETE_RUN[missing + 1 :]))


@pytest.mark.parametrize(
    "event",
    [
        {"code": "Breach", "message": "recall-late: i0 is 2.0 s late", "numbers": {}},
        make_event("NodeReturned", early_s=-1.0),
        make_event("DecisionDropped"),
    ],
)
def test_late_return_or_illegal_decision_fails(event: dict[str, Any]) -> None:
    assert not all_passed(check_events([*COMPLETE_RUN, event]))


def test_leftover_process_fails() -> None:
    assert check_leftover_processes([]).passed
    assert not check_leftover_processes([42]).passed


def write_training(
    folder: Path, *, loss: float = 1.0, samples: tuple[int, ...] = (3, 4), again: bool = False
) -> TrainingRun:
    for name, value, seen in (("ledger", loss, samples), ("reference", 1.0, (3, 4))):
        (folder / name).mkdir()
        (folder / name / "losses-g1.jsonl").write_text(json.dumps({"step": 1, "loss": value}) + "\n")
        line = json.dumps({"step": 1, "samples": seen}) + "\n"
        (folder / name / "samples-g1-r0.jsonl").write_text(line * (2 if again and name == "ledger" else 1))
    return TrainingRun("job", 1, 2, folder / "ledger", folder / "reference")


def test_equal_losses_and_samples_pass(tmp_path: Path) -> None:
    assert all_passed(check_training(write_training(tmp_path)))


@pytest.mark.parametrize("fault", [{"loss": 1.001}, {"samples": (3, 5)}, {"samples": (3,)}, {"again": True}])
def test_wrong_loss_or_missing_or_repeated_sample_fails(tmp_path: Path, fault: dict[str, Any]) -> None:
    assert not all_passed(check_training(write_training(tmp_path, **fault)))


def test_demand_trace_is_eight_days_in_compressed_time() -> None:
    trace = load_demand_trace(day_s=170.0, peak_gpus=1.6)
    assert (len(trace.history), len(trace.today)) == (7 * 144, 144)
    assert trace.history[0].at_s == pytest.approx(-7 * 170.0)
    assert max(reading.gpus for reading in (*trace.history, *trace.today)) == pytest.approx(1.6)
    assert min(reading.gpus for reading in trace.today) > 0.3, "missing data is not zero demand"
