"""AFS-L: which job gets the next GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from scheduler.domain.decisions import ReasonCode
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_state import JobState
from scheduler.scheduling.policies.allotment import curve_speeds
from scheduler.scheduling.policies.elastic_share import elastic_shares
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import GPU, a_curve, a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=1, inference=0)
shares = partial(elastic_shares, settings=PolicySettings())


def test_shorter_job_leads_by_at_most_two_gpus() -> None:
    """Under linear scaling the longer job wins once 1 / (its GPUs + 1) is above 1 / those of the shorter."""
    jobs = [a_job("long", 1, 8, steps=9000), a_job("short", 1, 8, steps=100)]
    for gpus, short in ((2, 1), (3, 2), (4, 3), (5, 3), (6, 4), (7, 4), (8, 5)):
        assert dict(shares(a_snapshot(FLEET, jobs), gpus).gpus) == {"short": short, "long": gpus - short}


def test_next_gpu_minimizes_the_two_completion_times() -> None:
    """Two jobs of 200 and 1000 GPU-s have at most 3 GPUs each.

    The last of 5 GPUs ends them at 66.7 s and (1000 - 2 x 66.7) / 3 + 66.7 = 355.6 s if the short one gets it, and at
    100 s and 333.3 s if the long one does: 422.2 s in total, against 433.3 s.
    """
    jobs = [a_job("short", 2, 3, steps=200), a_job("long", 2, 3, steps=1000)]
    assert dict(shares(a_snapshot(FLEET, jobs), 5).gpus) == {"short": 3, "long": 2}


def test_bases_come_first_by_length_and_jobs_that_do_not_fit_are_passed_over() -> None:
    jobs = [a_job("long", 4, 8, steps=9000), a_job("wide", 6, 8, steps=4000), a_job("short", 3, 8, steps=300)]
    allotment = shares(a_snapshot(FLEET, jobs), 8)
    assert list(allotment.gpus.items()) == [("short", 4), ("long", 4)]
    assert allotment.waiting["wide"].code is ReasonCode.INSUFFICIENT_GPUS
    assert allotment.waiting["wide"].numbers["free_gpus"] == 5.0


def test_longer_running_job_loses_its_gpus_to_shorter_ones() -> None:
    runs = a_job("runs", 8, 8, state=JobState.RUNNING, on={"t0": tuple(range(8))}, steps=9000)
    allotment = shares(a_snapshot(FLEET, [runs, a_job("new", 1, 1, steps=60)]), 8)
    assert dict(allotment.gpus) == {"new": 1}
    assert list(allotment.waiting) == ["runs"]


def test_job_of_unknown_length_ranks_by_its_service_even_if_all_its_work_was_lost() -> None:
    lost = replace(a_job("lost", 8, 8, steps=0), account=JobAccount(gpu_s=8.0 * 600.0, lost_gpu_s=8.0 * 600.0))
    allotment = shares(a_snapshot(FLEET, [lost, a_job("short", 1, 1, steps=599)]), 8)
    assert list(allotment.gpus) == ["short"]
    assert allotment.waiting["lost"].numbers["remaining_s"] == 600.0


def test_enough_gpus_give_every_job_its_maximum() -> None:
    jobs = [a_job("a", 1, 3), a_job("b", 2, 5)]
    assert dict(shares(a_snapshot(FLEET, jobs), 8).gpus) == {"a": 3, "b": 5}


@pytest.mark.parametrize(("law", "expected"), [("linear", {"a": 5, "b": 3}), ("curve", {"a": 2, "b": 6})])
def test_curve_is_used_only_with_curve_speeds(law: str, expected: dict[str, int]) -> None:
    """`a` is measured on 1, 2 and 8 GPUs and hardly faster on 8 than on 2."""
    a, b = a_job("a", 1, 8, steps=1000, model="m", global_batch=8), a_job("b", 1, 8, steps=1000)
    speeds = {GpuShape.packed(GPU, count, 8): 1 / speed for count, speed in ((1, 1.0), (2, 2.0), (8, 2.1))}
    snapshot = a_snapshot(FLEET, [a, b], curves={a.spec.curve_key: a_curve(speeds)})
    chosen = shares(snapshot, 8) if law == "linear" else shares(snapshot, 8, speeds=curve_speeds())
    assert dict(chosen.gpus) == expected


def test_job_without_a_plan_waits_for_one() -> None:
    waiting = shares(a_snapshot(FLEET, [a_job("a", 1, 8, model="m", global_batch=8)]), 8).waiting
    assert waiting["a"].code is ReasonCode.WAITING_FOR_PLAN
