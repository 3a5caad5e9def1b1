"""Memory correction and backoff after out-of-memory failures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.job_records import NO_OOM_FAILURES, OOM_ATTEMPTS_MAX, MemoryRecord, OomFailure

BYTES = st.integers(1, 10**13)
FAILURE = OomFailure("dp2", 2, 80_000_000_000, 70_000_000_000, 79_000_000_000)


@given(gpu_bytes=BYTES, predicted=BYTES, measured=st.none() | BYTES, before=st.integers(20, 60))
def test_failed_plan_no_longer_fits_and_measured_peak_is_covered(
    gpu_bytes: int, predicted: int, measured: int | None, before: int
) -> None:
    record = MemoryRecord(5 * before).with_failure(OomFailure("dp2", 2, gpu_bytes, predicted, measured), 0.0)
    assert not record.fits(predicted, gpu_bytes)
    assert record.percent % 5 == 0
    assert record.percent >= 5 * before
    assert predicted * record.percent >= 100 * (measured or 0)


@pytest.mark.parametrize(
    ("failure", "percent"),
    [
        (FAILURE, 120),  # 80 / 70 plus the margin of 2% is 116.6%
        (replace(FAILURE, measured_bytes=None), 120),
        (replace(FAILURE, measured_bytes=90_000_000_000), 130),  # measured above the GPU's memory
        (replace(FAILURE, predicted_bytes=0), 100),  # without a prediction, nothing is corrected
    ],
)
def test_correction_is_the_smallest_grid_value_that_explains_the_failure(failure: OomFailure, percent: int) -> None:
    assert NO_OOM_FAILURES.with_failure(failure, 0.0).percent == percent


def test_backoff_doubles_until_no_attempt_is_left() -> None:
    record, pauses_s = NO_OOM_FAILURES, []
    while not record.is_exhausted:
        record = record.with_failure(FAILURE, 1000.0)
        assert record.retry_at_s is not None
        pauses_s.append(record.retry_at_s - 1000.0)
    assert pauses_s == [10.0, 20.0, 40.0][:OOM_ATTEMPTS_MAX]


def test_failure_is_described_with_its_numbers() -> None:
    assert str(FAILURE) == "dp2 on 2 GPUs (70.0 GB predicted, 79.0 GB measured, 80.0 GB per GPU)"
    unknown = OomFailure("dp1", 1, 80_000_000_000, 0, None)
    assert str(unknown) == "dp1 on 1 GPU (nothing predicted, nothing measured, 80.0 GB per GPU)"


def test_correction_below_70_percent_is_rejected() -> None:
    with pytest.raises(ValueError, match="percent must be at least 70, got 65"):
        MemoryRecord(65)


@pytest.mark.parametrize(("ratio", "percent"), [(0.5, 70), (0.8, 90), (0.86, 95), (0.95, 100), (1.3, 100)])
def test_measured_memory_leaves_room_for_plans_that_were_not_measured(ratio: float, percent: int) -> None:
    assert NO_OOM_FAILURES.with_measured(ratio).percent == percent


def test_a_failure_ends_what_was_expected_of_measured_memory() -> None:
    failed = NO_OOM_FAILURES.with_measured(0.5).with_failure(FAILURE, 0.0)
    assert failed.percent == 120
    assert failed.with_measured(0.5) is failed
