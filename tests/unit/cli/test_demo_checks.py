"""Checks of the demo fail if an expected event, loss or sample is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.demo.checks import (
    EXPECTED_EVENTS,
    CheckResult,
    TrainingRun,
    build_summary,
    check_events,
    check_leftover_processes,
    check_recalls,
    check_surge,
    check_training,
    check_usage,
)
from cli.demo.demand_trace import load_demand_trace

SUBJECTS = {"i0"}


def make_event(code: str, subject: str = "i0") -> dict[str, Any]:
    return {"code": code, "subject": subject}


def make_receipt(outcome: str | None = "in_time", *, asked_at_s: float = 100.0, after_s: float = 5.0) -> Any:
    returned_at_s = None if outcome is None else asked_at_s + after_s
    return {
        "asked_at_s": asked_at_s,
        "return_by_s": asked_at_s + 15.0,
        "returned_at_s": returned_at_s,
        "outcome": outcome,
    }


def make_usage(lent_gpu_s: float, lost_gpu_s: float = 0.0) -> Any:
    return {"lent_gpu_s": lent_gpu_s, "lost_gpu_s": lost_gpu_s, "own_gpu_s": 0.0, "gpu_s": lent_gpu_s}


def make_day(surged_at_s: float | None, until_s: float | None) -> Any:
    return {"surged_at_s": surged_at_s, "surge_until_s": until_s}


COMPLETE_RUN = [make_event(code) for code in EXPECTED_EVENTS.values()]


def all_passed(results: Any) -> bool:
    return all(result.passed for result in results)


def test_complete_run_passes() -> None:
    assert all_passed(check_events(COMPLETE_RUN, subjects=SUBJECTS))


@pytest.mark.parametrize("missing", range(len(EXPECTED_EVENTS)))
def test_missing_event_fails(missing: int) -> None:
    events = COMPLETE_RUN[:missing] + COMPLETE_RUN[missing + 1 :]
    assert not all_passed(check_events(events, subjects=SUBJECTS))


def test_events_of_simulated_nodes_prove_nothing_about_the_trainings() -> None:
    simulated = [{**event, "subject": "sim-i00"} for event in COMPLETE_RUN]
    assert not all_passed(check_events(simulated, subjects=SUBJECTS))


def test_illegal_decision_fails() -> None:
    events = [*COMPLETE_RUN, make_event("DecisionDropped", "sim-i00")]
    assert not all_passed(check_events(events, subjects=SUBJECTS))


def test_late_recalls_and_a_day_without_recalls_fail() -> None:
    assert check_recalls([make_receipt(), make_receipt("cancelled")]).passed
    assert not check_recalls([make_receipt(), make_receipt("late", after_s=16.0)]).passed
    assert not check_recalls([]).passed


def test_a_surge_counts_the_recalls_that_it_caused() -> None:
    before, during = make_receipt("late", asked_at_s=90.0), make_receipt(asked_at_s=101.0)
    surge = check_surge([before, during], make_day(100.0, 120.0))
    assert surge is not None
    assert surge.passed
    assert check_surge([during], make_day(None, None)) is None
    unreturned = check_surge([make_receipt(None, asked_at_s=101.0)], make_day(100.0, 120.0))
    assert unreturned is not None
    assert not unreturned.passed


def test_usage_counts_lent_gpus_alone() -> None:
    assert check_usage(make_usage(3600.0)).passed
    assert not check_usage(make_usage(0.0)).passed


def test_the_last_line_has_the_measured_numbers() -> None:
    equal = [CheckResult("", "", "", passed=True)]
    summary = build_summary(make_usage(9000.0), [make_receipt()], equal)
    assert summary == "2.50 GPU-hours recovered, 0 recalls late, losses equal to an uninterrupted run"
    differing = build_summary(make_usage(0.0), [make_receipt("late")], [CheckResult("", "", "", passed=False)])
    assert "1 recall late" in differing
    assert "losses equal" not in differing


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
    trace = load_demand_trace(day_s=170.0)
    assert (len(trace.history), len(trace.today)) == (7 * 144, 144)
    assert trace.history[0].at_s == pytest.approx(-7 * 170.0)
    assert max(sample.share for sample in (*trace.history, *trace.today)) == pytest.approx(1.0)
    assert min(sample.share for sample in trace.today) > 0.2, "missing data is not zero demand"


def test_demand_stays_after_the_last_sample() -> None:
    trace = load_demand_trace(day_s=180.0)
    assert trace.get_share(0.0) == trace.today[0].share
    assert trace.get_share(-1.0) == trace.history[-1].share
    assert trace.get_share(1e6) == trace.today[-1].share
