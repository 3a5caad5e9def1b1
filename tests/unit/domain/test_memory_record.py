"""What deaths by memory teach."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.job_records import NO_OOM_FAILURES, OOM_ATTEMPTS_MAX, MemoryRecord, OomFailure

BYTES = st.integers(1, 10**13)
DEATH = OomFailure("dp2", 2, 80_000_000_000, 70_000_000_000, 79_000_000_000)


@given(gpu_bytes=BYTES, predicted=BYTES, measured=st.none() | BYTES, before=st.integers(20, 60))
def test_the_plan_that_died_fits_no_more_and_what_was_measured_would_not_have_surprised(
    gpu_bytes: int, predicted: int, measured: int | None, before: int
) -> None:
    record = MemoryRecord(5 * before).with_failure(OomFailure("dp2", 2, gpu_bytes, predicted, measured), 0.0)
    assert not record.fits(predicted, gpu_bytes)
    assert record.percent % 5 == 0
    assert record.percent >= 5 * before
    assert predicted * record.percent >= 100 * (measured or 0)


@pytest.mark.parametrize(
    ("death", "percent"),
    [
        (DEATH, 120),  # beyond the GPU: 80 / 70 and two per cent are 116.6%
        (replace(DEATH, measured_bytes=None), 120),
        (replace(DEATH, measured_bytes=90_000_000_000), 130),  # measured beyond it, as host memory may be
        (replace(DEATH, predicted_bytes=0), 100),  # nothing was predicted, so nothing is corrected
    ],
)
def test_a_correction_is_the_least_of_the_grid_that_explains_the_death(death: OomFailure, percent: int) -> None:
    assert NO_OOM_FAILURES.with_failure(death, 0.0).percent == percent


def test_each_pause_is_twice_the_one_before_until_no_try_is_left() -> None:
    record, pauses_s = NO_OOM_FAILURES, []
    while not record.is_exhausted:
        record = record.with_failure(DEATH, 1000.0)
        assert record.retry_at_s is not None
        pauses_s.append(record.retry_at_s - 1000.0)
    assert pauses_s == [10.0, 20.0, 40.0][:OOM_ATTEMPTS_MAX]
    assert record.is_backing_off(1039.9)
    assert not record.is_backing_off(1040.0)


def test_a_death_is_told_with_its_numbers() -> None:
    assert str(DEATH) == "dp2 on 2 GPUs (70.0 GB predicted, 79.0 GB measured, 80.0 GB a GPU)"
    unknown = OomFailure("dp1", 1, 80_000_000_000, 0, None)
    assert str(unknown) == "dp1 on 1 GPU (nothing predicted, nothing measured, 80.0 GB a GPU)"


def test_a_job_never_needs_less_than_is_predicted() -> None:
    with pytest.raises(ValueError, match="percent must be at least 100, got 95"):
        MemoryRecord(95)
