"""Measured steps in the snapshot: replaced by job and plan, bounded, and shared fairly among owners."""

from __future__ import annotations

from math import log

import pytest

from scheduler.domain.codec import decode, encode
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.step_measurements import (
    MODELS_MAX,
    ROWS_MAX,
    ModelMeasurements,
    StepMeasurement,
    build_measurements_key,
    get_gpu,
    record_measurement,
)

TERMS = (0.5, 0.2, 0.1, 0.0, 0.1, 0.1)


def a_row(job: str, owner: str = "o", *, degree: float = 0.0, ratio: float = 1.5) -> StepMeasurement:
    return StepMeasurement.from_ratio(job, owner, TERMS, (degree,), ratio)


def test_a_row_replaces_that_of_its_job_and_plan_once_it_has_changed() -> None:
    first = ModelMeasurements(0.0).with_row(a_row("a"), 1.0)
    assert first.with_row(a_row("a", ratio=1.501), 2.0) is first
    changed = first.with_row(a_row("a", ratio=2.0), 2.0)
    assert [row.log_ratio for row in changed.rows] == [pytest.approx(log(2.0), abs=1e-3)]
    assert len(changed.with_row(a_row("a", degree=1.0), 3.0).rows) == 2


def test_the_owner_with_most_rows_makes_room() -> None:
    known = ModelMeasurements(0.0).with_row(a_row("first", "small"), 0.0)
    for number in range(3 * ROWS_MAX):
        known = known.with_row(a_row(f"j{number}", "large"), float(number))
    assert len(known.rows) == ROWS_MAX
    assert known.rows[0].job == "first"
    assert known.rows[-1].job == f"j{3 * ROWS_MAX - 1}"


def test_the_model_that_was_longest_unchanged_is_dropped() -> None:
    known = {f"a100 m{number}": ModelMeasurements(float(number)) for number in range(MODELS_MAX)}
    after = record_measurement(known, "h100 m", a_row("a"), 1e6)
    assert len(after) == MODELS_MAX
    assert "a100 m0" not in after
    assert record_measurement(after, "h100 m", a_row("a"), 2e6) is after


@pytest.mark.parametrize(("ratio", "expected"), [(1e9, log(1000.0)), (0.0, -log(1000.0)), (float("inf"), log(1000.0))])
def test_ratios_are_limited(ratio: float, expected: float) -> None:
    assert a_row("a", ratio=ratio).log_ratio == pytest.approx(expected, abs=1e-3)


def test_keys_name_gpu_model_and_model_without_the_batch() -> None:
    small, large = (CurveRequest("gpt2", "", batch, 0) for batch in (8, 64))
    assert build_measurements_key("a100-80g", small.model_key) == build_measurements_key("a100-80g", large.model_key)
    assert get_gpu(build_measurements_key("a100-80g", small.model_key)) == "a100-80g"


def test_measurements_survive_encoding() -> None:
    known = ModelMeasurements(3.0).with_row(a_row("a"), 5.0)
    assert decode(ModelMeasurements, encode(known)) == known
