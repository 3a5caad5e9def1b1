"""Usage records: hours, kinds of GPU, lost work and unsettled usage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.job import Job
from scheduler.domain.job_queue import UsageEntry, UsageKey
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import name_model
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.allocation_spans import compute_span_changes
from scheduler.scheduling.usage import compute_unsettled_usage, compute_usage_delta, sum_usage
from tests.builders import GPU, a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=1, inference=1)
OWN, LENT = (UsageKey(3600, "vision", "name:ada", GPU, is_lent) for is_lent in (False, True))


def adas(job_id: str = "j", **more: Any) -> Job:
    """Return a job that has held 2 owned GPUs since 4,000 s, and is releasing a lent one."""
    on, releasing = {"t0": (0, 1)}, {"i0": (5,)}
    job = a_job(job_id, 2, state=JobState.RUNNING, on=on, releasing=releasing, now_s=4000.0, queue="vision")
    return replace(job, owner="ada", **more)


def after(snapshot: Snapshot, job: Job, now_s: float) -> Snapshot:
    return replace(snapshot, jobs={**snapshot.jobs, job.id: job}, now_s=now_s)


def test_settled_usage_is_recorded_by_gpu_kind_and_hour() -> None:
    snapshot = a_snapshot(FLEET, [adas(), adas("idle")])
    moved = adas().transition_to(JobState.RESIZING, 7300.0, allocation=replace(adas().allocation, target={"t0": (0,)}))
    later = [replace(kind, hour_s=7200) for kind in (OWN, LENT)]
    assert compute_usage_delta(snapshot, after(snapshot, moved, 7300.0)) == (
        UsageEntry(OWN, 6400.0),
        UsageEntry(LENT, 3200.0),
        UsageEntry(later[0], 200.0),
        UsageEntry(later[1], 100.0),
    )
    assert moved.account.gpu_s == 3 * 3300.0


def test_unsettled_usage_is_computed_on_demand() -> None:
    snapshot = a_snapshot(FLEET, [adas()])
    measured = adas().with_progress(replace(adas().progress, steps=7.0))
    assert compute_usage_delta(snapshot, after(snapshot, measured, 5000.0)) == ()
    assert compute_usage_delta(snapshot, snapshot) == ()
    assert compute_unsettled_usage(snapshot, 4010.0) == (UsageEntry(OWN, 20.0), UsageEntry(LENT, 10.0))
    assert compute_unsettled_usage(snapshot, 4010.0, from_s=4006.0) == (UsageEntry(OWN, 8.0), UsageEntry(LENT, 4.0))
    assert compute_unsettled_usage(snapshot, 3990.0) == (), "a clock that was set back takes nothing away"


def test_usage_and_spans_name_the_model_that_a_job_trains() -> None:
    profile = '{"layers": 1}'
    specs: dict[str, dict[str, Any]] = {
        "preset": {"model": "llama-2-7b", "global_batch": 8},
        "own": {"profile_json": profile, "global_batch": 8},
        "none": {},
    }
    jobs = [replace(adas(name), spec=replace(adas().spec, **fields)) for name, fields in specs.items()]
    usage = compute_unsettled_usage(a_snapshot(FLEET, jobs), 4010.0)
    assert {entry.key.model for entry in usage} == {"", "llama-2-7b", name_model("", profile)}
    assert sum(entry.gpu_s for entry in usage) == 3 * 30.0
    spans = compute_span_changes(a_snapshot(FLEET), a_snapshot(FLEET, jobs)).begun
    assert {span.job_id: span.model for span in spans} == {job.id: job.spec.model_label for job in jobs}


def test_owners_of_one_name_are_counted_apart() -> None:
    jobs = [replace(adas(job_id), owner_id=owner_id) for job_id, owner_id in (("j", "token:1"), ("k", "token:2"))]
    snapshot = replace(a_snapshot(FLEET), jobs={job.id: job for job in jobs})
    usage = compute_unsettled_usage(snapshot, 4010.0)
    kinds = [(entry.key.owner_id, entry.key.is_lent, entry.gpu_s, entry.owner) for entry in usage]
    assert kinds == [
        ("token:1", False, 20.0, "ada"), ("token:1", True, 10.0, "ada"),
        ("token:2", False, 20.0, "ada"), ("token:2", True, 10.0, "ada"),
    ]  # fmt: skip
    assert [entry.owner for entry in sum_usage((*usage, replace(usage[0], owner="ann")))][:2] == ["ann", "ada"]


def test_new_job_has_no_usage() -> None:
    snapshot = a_snapshot(FLEET)
    assert compute_usage_delta(snapshot, after(snapshot, adas(), 5000.0)) == ()


@pytest.mark.parametrize("from_s", [4000.0, 5000.0, 7199.5, 7200.0])
def test_partial_settlements_add_up(from_s: float) -> None:
    snapshot = a_snapshot(FLEET, [adas()])
    halfway = after(snapshot, adas().advance_to(from_s), from_s)
    end = after(snapshot, adas().advance_to(20_000.0), 20_000.0)
    assert sum_usage(
        (*compute_usage_delta(snapshot, halfway), *compute_usage_delta(halfway, end))
    ) == compute_usage_delta(snapshot, end)
    assert sum_usage(
        (*compute_usage_delta(snapshot, halfway), *compute_unsettled_usage(halfway, 20_000.0))
    ) == compute_unsettled_usage(snapshot, 20_000.0)


def test_lost_work_is_spread_over_the_held_gpus() -> None:
    snapshot, settled = a_snapshot(FLEET, [adas()]), adas().advance_to(4100.0)
    fallen = replace(settled, account=replace(settled.account, lost_gpu_s=90.0))
    lost = compute_usage_delta(snapshot, after(snapshot, fallen, 4100.0))
    assert lost == (UsageEntry(OWN, 200.0, 60.0), UsageEntry(LENT, 100.0, 30.0))


def test_lost_work_without_gpus_counts_on_the_required_model() -> None:
    job = replace(a_job("j", queue="vision", gpu=GPU, now_s=4000.0), owner="ada")
    fallen = replace(job, account=replace(job.account, lost_gpu_s=5.0))
    snapshot = a_snapshot(FLEET, [job])
    assert compute_usage_delta(snapshot, after(snapshot, fallen, 4000.0)) == (UsageEntry(OWN, 0.0, 5.0),)
