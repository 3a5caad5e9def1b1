"""InferenceShortages counts the demand intervals in which a pod was missing."""

from __future__ import annotations

import pytest

from scheduler.simulator.demand import DemandChange
from scheduler.simulator.inference_shortages import InferenceShortages, sum_unserved_gpu_s
from scheduler.simulator.report import ShortageRatio


def record(*changes: tuple[float, bool], pool: str = "inference") -> InferenceShortages:
    shortages = InferenceShortages([pool])
    for at_s, first_pass in changes:
        shortages.record_demand_change(DemandChange(at_s, pool, 4.0, first_pass))
    return shortages


def test_interval_is_short_if_any_part_of_it_lacks_a_pod() -> None:
    shortages = record((0.0, True), (600.0, True), (1200.0, True))
    unserved = {"inference": [(700.0, 2.0), (700.5, 0.0)]}
    assert shortages.compute_ratio(unserved, end_s=1800.0) == ShortageRatio(1 / 3, 1 / 3)


def test_shortage_that_spans_intervals_counts_in_each() -> None:
    shortages = record((0.0, True), (1.0, True), (2.0, False), (3.0, False))
    unserved = {"inference": [(0.5, 1.0), (2.5, 0.0)]}
    assert shortages.compute_ratio(unserved, end_s=4.0) == ShortageRatio(1.0, 3 / 4)


def test_intervals_after_the_end_do_not_count() -> None:
    shortages = record((0.0, True), (600.0, True), (1200.0, True))
    unserved = {"inference": [(700.0, 2.0)]}
    assert shortages.compute_ratio(unserved, end_s=1000.0) == ShortageRatio(1 / 2, 1 / 2)


def test_no_demand_has_no_shortage() -> None:
    assert record().compute_ratio({}, end_s=100.0) == ShortageRatio(0.0, 0.0)


def test_unserved_gpu_seconds_are_those_between_start_and_end() -> None:
    unserved = {"a": [(0.0, 2.0), (10.0, 0.0)], "b": [(50.0, 1.5)]}
    assert sum_unserved_gpu_s(unserved, start_s=5.0, end_s=60.0) == pytest.approx(2.0 * 5.0 + 1.5 * 10.0)
    assert sum_unserved_gpu_s(unserved, start_s=5.0, end_s=5.0) == 0.0
