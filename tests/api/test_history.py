"""A job's history: states, allocations and samples."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from api.job_details import HISTORY_ITEMS_MAX, job_history_view
from scheduler.domain.events import Event, EventCode, JobStep
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.worker_token import issue_worker_token
from tests.api.conftest import NOW_S, SECRET

if TYPE_CHECKING:
    from tests.api.conftest import ApiService


def history(fleet: ApiService, job_id: str) -> dict[str, Any]:
    return fleet.get(f"/v1/jobs/{job_id}/history")


def states(view: dict[str, Any]) -> list[str]:
    return [step["state"] for step in view["states"]]


def allocations(view: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(step["generation"], step["gpus"], step["lent_gpus"]) for step in view["allocations"]]


def test_a_new_job_is_submitted_and_holds_nothing(fleet: ApiService) -> None:
    job_id = fleet.submit()
    assert history(fleet, job_id) == {
        "job_id": job_id,
        "states": [{"at_s": NOW_S, "state": "submitted", "message": ""}],
        "allocations": [{"at_s": NOW_S, "generation": 0, "gpus": 0, "lent_gpus": 0, "plan": None}],
        "samples": [],
    }


def test_history_reaches_from_submission_to_the_end_and_survives_the_job(
    fleet: ApiService,
) -> None:
    job_id = fleet.submit()
    fleet.tick()
    fleet.tick()
    fleet.http.patch(f"/v1/jobs/{job_id}", json={"gpus": {"max": 1}})
    fleet.tick()
    fleet.tick()
    fleet.http.delete(f"/v1/jobs/{job_id}")
    fleet.tick()
    fleet.tick()
    assert job_id not in fleet.store.load().snapshot.jobs
    view = history(fleet, job_id)
    assert states(view) == ["submitted", "queued", "starting", "running", "resizing", "running", "cancelled"]
    assert allocations(view) == [(0, 0, 0), (1, 2, 0), (2, 1, 0), (3, 0, 0)]
    assert [step["plan"] for step in view["allocations"]] == [None, "dp2 · 1 micro-batch", "dp1 · 1 micro-batch", None]
    assert [step["at_s"] for step in view["states"]] == [NOW_S + at for at in (1, 1, 1, 2, 3, 4, 5)]
    assert view["states"][0]["message"] == "train, 1 to 2 GPUs"
    assert view["states"][1]["message"] == ""


def test_lent_gpus_are_counted_separately(fleet: ApiService) -> None:
    fleet.lend_all()
    [job] = fleet.get("/v1/jobs")["items"]
    assert allocations(history(fleet, job["id"])) == [(0, 0, 0), (1, 4, 2)]


def test_a_command_in_the_inbox_is_visible_at_once(fleet: ApiService) -> None:
    job_id = fleet.submit()
    fleet.made(f"/v1/jobs/{job_id}:suspend")
    fleet.tick()
    fleet.clock.move_to(NOW_S + 9.0)
    fleet.made(f"/v1/jobs/{job_id}:resume")
    before, resumed = history(fleet, job_id)["states"][-2:]
    assert (before["state"], resumed["state"], resumed["at_s"]) == ("suspended", "queued", NOW_S + 9.0)


def test_progress_reports_become_samples_at_least_5_s_apart(fleet: ApiService) -> None:
    job_id = fleet.submit()
    fleet.tick()
    fleet.tick()
    token = issue_worker_token(SECRET, job_id, 1)
    for step in range(12):
        report = {"generation": 1, "step": step, "loss": 4.0 - step / 10}
        if step == 10:
            report |= {"samples_per_s": 8.5, "peak_bytes": 70_000_000_000}
        assert fleet.post(f"/v1/jobs/{job_id}/progress", report, token=token).status_code == 200
        fleet.tick()
    samples = history(fleet, job_id)["samples"]
    assert [(at["at_s"] - NOW_S, at["steps"], at["loss"]) for at in samples] == [
        (2.0, 0.0, 4.0), (7.0, 5.0, 3.5), (12.0, 10.0, 3.0),
    ]  # fmt: skip
    assert [(at["samples_per_s"], at["peak_bytes"]) for at in samples] == [(None, None)] * 2 + [(8.5, 70_000_000_000)]
    fleet.http.delete(f"/v1/jobs/{job_id}")
    fleet.tick()
    fleet.tick()
    assert history(fleet, job_id)["samples"] == samples


JOB = Job("a", JobSpec("a", 1, 1), JobState.RUNNING, 0.0, 7.0, Progress(7.0), message="it runs")


def test_events_of_older_versions_are_completed_with_the_current_state() -> None:
    old = [Event(5.0, EventCode.JOB_STATE, "a", "starting -> running")]
    view = job_history_view(JOB, old, [], Snapshot())
    assert view["states"] == [{"at_s": 7.0, "state": JobState.RUNNING, "message": "it runs"}]


def test_events_newer_than_the_snapshot_win() -> None:
    newer = [Event(8.0, EventCode.JOB_PREEMPTED, "a", "the node went home", job=JobStep(JobState.PREEMPTED, 2))]
    view = job_history_view(JOB, newer, [], Snapshot())
    assert view["states"] == [{"at_s": 8.0, "state": JobState.PREEMPTED, "message": "the node went home"}]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), st.booleans())
def test_allocations_are_deduplicated_and_the_newest_are_kept(steps: list[tuple[int, int]], many: bool) -> None:
    steps = steps * (60 if many else 1)
    events = [
        Event(float(at), EventCode.JOB_STATE, "a", "x -> y: z", job=JobStep(JobState.RESIZING, generation, gpus))
        for at, (generation, gpus) in enumerate(steps)
    ]
    view = job_history_view(JOB, events, [], Snapshot())
    assert len(view["states"]) <= HISTORY_ITEMS_MAX
    assert len(view["allocations"]) <= HISTORY_ITEMS_MAX
    kinds = [{**step, "at_s": 0.0} for step in view["allocations"]]
    assert all(one != other for one, other in pairwise(kinds))
    if len(steps) > 8:
        assert view["allocations"][-1]["generation"] == steps[-1][0]
        assert view["states"][-1]["at_s"] == len(steps) - 1
