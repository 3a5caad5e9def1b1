"""Jobs over HTTP, from submission to the end, with real ticks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from api.explanations import explanation_view
from api.jobs import failure_view, job_view
from scheduler.domain.commands import Command, ReportProgress, ScaleJob, SubmitJob
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.scheduling.explanation import explain_ended
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.api.conftest import JOB
from tests.builders_solver import LAYER

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


def test_a_submitted_job_has_a_location_and_is_visible_before_any_tick(service: ApiService) -> None:
    answer = service.post("/v1/jobs", {**JOB, "gpus": {"min": 1, "max": 4}, "maxRunTime": "1h30m"})
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert re.fullmatch("train-[a-z2-7]{10}", job["id"])
    found = service.get(answer.headers["location"])
    assert found["state"] == "submitted"
    assert found["spec"]["maxRunTime"] == 5400.0
    assert found["gpus"] == {"min": 1, "max": 4, "target": 0, "releasing": 0}
    assert [item["id"] for item in service.get("/v1/jobs")["items"]] == [job["id"]]


def test_a_request_only_sends_a_command(service: ApiService) -> None:
    job_id = service.submit()
    loaded = service.store.load()
    assert loaded.snapshot.generation == 0
    assert not loaded.snapshot.jobs
    [command] = loaded.inbox
    assert isinstance(command.body, SubmitJob)
    assert command.body.job_id == job_id


def test_jobs_with_the_same_name_get_different_ids(service: ApiService) -> None:
    assert service.submit("same") != service.submit("same")


def test_speeds_are_part_of_the_job_document(service: ApiService) -> None:
    body = {**JOB, "gpus": {"min": 1, "max": 4}, "speeds": {"a100-80g": 1, "t4": 0.18}}
    made = service.made("/v1/jobs", body)
    assert service.get(f"/v1/jobs/{made['id']}")["spec"]["speeds"] == {"a100-80g": 1.0, "t4": 0.18}


@pytest.mark.parametrize(
    ("speeds", "field", "words"),
    [({"t4": 0}, "speeds.t4", "greater than 0"), ({"t5": 0.2}, "speeds", "one of a100-40g")],
)
def test_invalid_speeds_are_refused_and_nothing_changes(
    service: ApiService, problem: Problem, speeds: dict[str, float], field: str, words: str
) -> None:
    body = {**JOB, "gpus": {"min": 1, "max": 4}, "speeds": speeds}
    (invalid,) = problem(service.http.post("/v1/jobs", json=body), 422)["errors"]
    assert invalid["field"] == field
    assert words in invalid["allowed"]
    assert service.store.load().inbox == ()


def test_lengths_are_part_of_the_job_document_and_of_its_curve(service: ApiService) -> None:
    body = {**JOB, "gpus": {"min": 1, "max": 4}, "model": "gpt2", "globalBatch": 8, "lengths": {"64": 3}}
    made = service.made("/v1/jobs", body)
    assert service.get(f"/v1/jobs/{made['id']}")["spec"]["lengths"] == {"64": 3}
    (command,) = service.store.load().inbox
    assert isinstance(command.body, SubmitJob)
    assert command.body.spec.curve_key.startswith("gpt2/batch-8/seq-0/lengths-")


@pytest.mark.parametrize(
    ("lengths", "more", "words"),
    [
        ({"2048": 1}, {"model": "gpt2"}, "at most 1024 tokens"),
        ({"513": 1}, {"model": "gpt2", "sequenceLength": 512}, "at most 512 tokens"),
        ({"64": 1}, {"profile": {"name": "own", "sequence_length": 128, "layers": [LAYER]}}, "that the model supports"),
    ],
)
def test_lengths_that_the_model_does_not_support_are_refused(
    service: ApiService, problem: Problem, lengths: dict[str, int], more: dict[str, Any], words: str
) -> None:
    body = {**JOB, "gpus": {"min": 1, "max": 4}, "globalBatch": 8, "lengths": lengths, **more}
    (invalid,) = problem(service.http.post("/v1/jobs", json=body), 422)["errors"]
    assert invalid["field"] == "lengths"
    assert words in invalid["allowed"]
    assert service.store.load().inbox == ()


def test_a_job_starts_with_the_next_tick_and_shows_its_gpus_and_plan(fleet: ApiService) -> None:
    job_id = fleet.submit()
    fleet.tick()
    job = fleet.get(f"/v1/jobs/{job_id}")
    assert job["state"] == "starting"
    assert job["nodes"] == {"t0": [0, 1]}
    assert job["generation"] == 1
    plan = fleet.get(f"/v1/jobs/{job_id}/plan")
    assert plan["stages"][0]["gpus"] == 2
    assert set(plan) >= {"schedule", "micro_batches", "iteration_time_s", "peak_bytes_per_gpu", "optimality_gap"}
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["state"] == "running"
    body = [event["code"] for event in fleet.get(f"/v1/jobs/{job_id}/events")["items"]]
    assert "JobStarted" in body


def test_progress_that_was_never_reported_is_an_estimate(fleet: ApiService) -> None:
    job_id = fleet.submit()
    before = fleet.get(f"/v1/jobs/{job_id}/progress")
    assert (before["steps"], before["fraction"], before["estimate"]) == (0.0, 0.0, None), "it has not started"
    fleet.tick()
    fleet.tick()
    fleet.tick(after_s=100.0)
    progress = fleet.get(f"/v1/jobs/{job_id}/progress")
    figures = ("steps", "fraction", "step_time_s", "samples_per_s", "remaining_s")
    assert [progress[name] for name in figures] == [None] * 5
    estimate = progress["estimate"]
    assert 0 < estimate["fraction"] < 1
    assert min(estimate["steps"], estimate["step_time_s"], estimate["remaining_s"]) > 0
    assert fleet.get(f"/v1/jobs/{job_id}/plan")["is_estimated"] is True
    fleet.store.send(Command("report", fleet.clock.now_s(), ReportProgress(job_id, 1, 7.0)))
    fleet.tick()
    reported = fleet.get(f"/v1/jobs/{job_id}/progress")
    assert reported["steps"] == pytest.approx(7.0, abs=3.0), "extrapolated for one second"
    assert reported["estimate"] is None
    assert fleet.get(f"/v1/jobs/{job_id}/plan")["is_estimated"] is False


def test_resize_mode_follows_from_the_document_and_from_reports(fleet: ApiService) -> None:
    job_id = fleet.submit(onResize=None)
    assert fleet.get(f"/v1/jobs/{job_id}")["resize_mode"] == "never"
    fleet.tick()
    fleet.tick()
    fleet.http.patch(f"/v1/jobs/{job_id}", json={"gpus": {"max": 1}})
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["generation"] == 1, "it is not resized"
    fleet.store.send(Command("report", fleet.clock.now_s(), ReportProgress(job_id, 1, 7.0)))
    fleet.tick()
    job = fleet.get(f"/v1/jobs/{job_id}")
    assert (job["resize_mode"], job["generation"], job["gpus"]["target"]) == ("checkpoint", 2, 1)


def test_failed_run_is_part_of_the_job_and_its_explanation(fleet: ApiService) -> None:
    job_id = fleet.submit()
    fleet.tick()
    snapshot = fleet.store.load().snapshot
    failed = Run(job_id, 1, RunPhase.FAILED, reason="a | b", permanent_fault=PermanentFault.SYNTAX_ERROR, ran_s=0.5)
    update = update_snapshot(snapshot, Observation(fleet.clock.now_s(), snapshot.generation, (failed,)), ())
    job = update.snapshot.jobs[job_id]
    assert job_view(job, fleet.clock.now_s())["failure"] == {
        "code": "syntax-error",
        "reason": "a | b",
        "at_s": fleet.clock.now_s(),
        "ran_s": 0.5,
    }
    assert explanation_view(explain_ended(job), None)["failure"] == failure_view(job.failure)


def test_progress_shows_the_remaining_time(fleet: ApiService) -> None:
    job_id = fleet.submit()
    fleet.tick()
    fleet.tick()
    fleet.store.send(Command("report", fleet.clock.now_s(), ReportProgress(job_id, 1, 1.0)))
    fleet.tick(after_s=100.0)
    progress = fleet.get(f"/v1/jobs/{job_id}/progress")
    assert 0 < progress["fraction"] < 1
    assert progress["remaining_s"] > 0
    assert progress["steps_total"] == 1000


def test_scaling_keeps_the_other_bound_and_is_visible_at_once(fleet: ApiService) -> None:
    job_id = fleet.submit()
    answer = fleet.http.patch(f"/v1/jobs/{job_id}", json={"gpus": {"max": 4}})
    assert answer.status_code == 202
    assert answer.json()["gpus"]["min"] == 1
    assert answer.json()["gpus"]["max"] == 4
    assert fleet.store.load().inbox[-1].body == ScaleJob(job_id, 1, 4)
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["spec"]["gpus"] == {"min": 1, "max": 4}


def test_a_job_is_suspended_resumed_and_cancelled(fleet: ApiService) -> None:
    job_id = fleet.submit()
    fleet.tick()
    fleet.tick()
    assert fleet.post(f"/v1/jobs/{job_id}:suspend").json()["intent"] == "suspend"
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["state"] == "suspended"
    fleet.tick()
    assert fleet.post(f"/v1/jobs/{job_id}:resume").json()["state"] == "queued"
    assert fleet.http.delete(f"/v1/jobs/{job_id}").json()["intent"] == "cancel"
    for _ in range(3):
        fleet.tick()
    ended = fleet.get(f"/v1/jobs/{job_id}")
    assert ended["state"] == "cancelled"
    assert job_id not in fleet.store.load().snapshot.jobs
    assert fleet.http.delete(f"/v1/jobs/{job_id}").status_code == 202


def test_an_ended_job_refuses_changes(fleet: ApiService, problem: Problem) -> None:
    job_id = fleet.submit()
    fleet.http.delete(f"/v1/jobs/{job_id}")
    fleet.tick()
    fleet.tick()
    for answer in (
        fleet.http.patch(f"/v1/jobs/{job_id}", json={"gpus": {"max": 4}}),
        fleet.post(f"/v1/jobs/{job_id}:suspend"),
        fleet.post(f"/v1/jobs/{job_id}:resume"),
    ):
        assert "cancelled" in problem(answer, 409)["detail"]
    explanation = fleet.get(f"/v1/jobs/{job_id}/explanation")
    assert explanation["state"] == "cancelled"


def test_resuming_a_job_that_is_not_suspended_is_a_conflict(service: ApiService, problem: Problem) -> None:
    job_id = service.submit()
    assert "not suspended" in problem(service.post(f"/v1/jobs/{job_id}:resume"), 409)["detail"]


def test_an_unknown_job_is_a_404_everywhere(service: ApiService, problem: Problem) -> None:
    for path in ("", "/plan", "/events", "/history", "/explanation", "/progress"):
        assert problem(service.http.get(f"/v1/jobs/nobody{path}"), 404)["type"].endswith(":not-found")
    for verb in ("suspend", "resume"):
        problem(service.post(f"/v1/jobs/nobody:{verb}"), 404)
    problem(service.http.delete("/v1/jobs/no body"), 404)
    problem(service.http.patch("/v1/jobs/nobody", json={"gpus": {}}), 404)


def test_a_job_without_a_plan_is_a_404(service: ApiService, problem: Problem) -> None:
    job_id = service.submit()
    assert "has no plan" in problem(service.http.get(f"/v1/jobs/{job_id}/plan"), 404)["detail"]


def test_a_pending_job_is_explained_with_numbers(fleet: ApiService) -> None:
    first = fleet.submit("first", gpus={"min": 2, "max": 2})
    fleet.tick()
    fleet.tick()
    second = fleet.submit("second", gpus={"min": 2, "max": 2})
    fleet.tick()
    body = fleet.get(f"/v1/jobs/{second}/explanation")
    assert body["state"] == "queued"
    assert body["needed_gpus"] == 2
    assert body["free_gpus"] == 0
    assert body["holders"] == {first: 2}
    assert body["reason"]["code"]
    assert body["unblocks"]


def test_a_dry_run_shows_decisions_and_stores_nothing(fleet: ApiService) -> None:
    fleet.tick()
    before = fleet.store.load()
    body = fleet.made("/v1/jobs:dry-run", {"name": "maybe", "gpus": {"min": 1, "max": 2}, "steps": 10})
    assert body["state"] == "starting"
    assert body["job"]["nodes"] == {"t0": [0, 1]}
    assert body["plan"]["stages"][0]["gpus"] == 2
    waits = fleet.made("/v1/jobs:dry-run", {"name": "maybe", "gpus": {"min": 64, "max": 64}})
    assert waits["state"] == "queued"
    assert waits["reason"]["detail"]
    assert fleet.store.load() == before


def test_a_dry_run_names_only_decisions_caused_by_the_job(fleet: ApiService) -> None:
    other = fleet.submit("other")
    fleet.tick()
    fleet.tick(after_s=400.0)
    assert fleet.get(f"/v1/jobs/{other}")["gpus"]["target"] == 2
    body = fleet.made("/v1/jobs:dry-run", {"name": "maybe", "gpus": {"min": 1, "max": 1}, "steps": 10})
    [shrunk] = body["resized"]
    assert (shrunk["job_id"], shrunk["from_gpus"], shrunk["to_gpus"]) == (other, 2, 1)
    assert (body["preempted"], body["lent"], body["placement"]) == ([], [], None)
    assert body["reason"]["code"] == "WaitingForPreemptedWorkloads"
    assert body["expected_start_s"] == shrunk["leave_by_s"]
    huge = fleet.made("/v1/jobs:dry-run", {"name": "huge", "gpus": {"min": 64, "max": 64}})
    assert (huge["resized"], huge["others"], huge["expected_start_s"]) == ([], [], None)


def test_a_dry_run_of_an_unsolved_job_is_planning(fleet: ApiService) -> None:
    job = {"name": "big", "gpus": {"min": 1, "max": 1}, "model": "gpt2", "globalBatch": 8, "sequenceLength": 128}
    assert fleet.made("/v1/jobs:dry-run", job)["state"] == "planning"


def test_pages_have_every_live_and_ended_job_once(fleet: ApiService) -> None:
    ended = [fleet.submit("gone") for _ in range(5)]
    for job_id in ended:
        fleet.http.delete(f"/v1/jobs/{job_id}")
    fleet.tick()
    live = []
    for _ in range(4):
        live.append(fleet.submit("here", gpus={"min": 64, "max": 64}))
        fleet.tick()
    seen, cursor = [], ""
    while True:
        page = fleet.get("/v1/jobs", limit=2, cursor=cursor)
        assert len(page["items"]) <= 2
        seen += [item["id"] for item in page["items"]]
        if page["next"] is None:
            break
        cursor = page["next"]
    assert seen[:4] == live[::-1]
    assert sorted(seen[4:]) == sorted(ended)


def test_paging_is_stable_while_jobs_end_and_arrive(fleet: ApiService) -> None:
    jobs = []
    for _ in range(6):
        jobs.append(fleet.submit("there", gpus={"min": 64, "max": 64}))
        fleet.tick()
    first = fleet.get("/v1/jobs", limit=2)
    for job_id in (jobs[0], jobs[5]):
        fleet.http.delete(f"/v1/jobs/{job_id}")
    fleet.tick()
    fleet.submit("late")
    fleet.tick()
    second = fleet.get("/v1/jobs", limit=2, cursor=first["next"])
    third = fleet.get("/v1/jobs", limit=2, cursor=second["next"])
    assert [item["id"] for page in (first, second, third) for item in page["items"]] == jobs[::-1]
    assert third["next"] is None
    assert third["items"][-1]["state"] == "cancelled"


def test_jobs_are_filtered_by_state_queue_owner_name_and_time(fleet: ApiService) -> None:
    fleet.create_queues("blue", "red")
    plain = fleet.submit("plain", queue="blue", gpus={"min": 64, "max": 64})
    fleet.tick(after_s=10.0)
    gone = fleet.submit("gone", queue="red")
    fleet.http.delete(f"/v1/jobs/{gone}")
    fleet.tick()
    middle_s = fleet.get(f"/v1/jobs/{gone}")["submitted_at_s"]
    asked: list[tuple[dict[str, str | float], list[str]]] = [
        ({"state": "queued"}, [plain]),
        ({"state": "live"}, [plain]),
        ({"state": "ended,queued"}, [gone, plain]),
        ({"state": "cancelled", "queue": "blue"}, []),
        ({"queue": "red,blue"}, [gone, plain]),
        ({"owner": "anybody", "name": "pl"}, [plain]),
        ({"owner": "nobody"}, []),
        ({"submitted_since_s": middle_s}, [gone]),
        ({"submitted_until_s": middle_s}, [plain]),
    ]
    for query, expected in asked:
        assert [item["id"] for item in fleet.get("/v1/jobs", **query)["items"]] == expected, query


def test_every_list_has_each_item_once(fleet: ApiService) -> None:
    fleet.lend_all()
    fleet.create_queues("other")
    fleet.submit("other", queue="other")
    for noun in ("jobs", "pools", "nodes", "queues", "loans", "events", "decisions"):
        whole = fleet.get(f"/v1/{noun}", limit=1000)["items"]
        assert len(whole) > 1, noun
        pages: list[object] = []
        cursor = ""
        while len(pages) <= len(whole):
            page = fleet.get(f"/v1/{noun}", limit=1, cursor=cursor)
            pages += page["items"]
            if not (cursor := page["next"] or ""):
                break
        assert pages == whole, noun


def test_jobs_are_listed_by_state_and_queue(fleet: ApiService) -> None:
    fleet.create_queues("blue", "red")
    running = fleet.submit(queue="red")
    fleet.tick()
    waiting = fleet.submit(queue="blue", gpus={"min": 64, "max": 64})
    fleet.tick()
    assert [job["id"] for job in fleet.get("/v1/jobs", state="running")["items"]] == [running]
    assert [job["id"] for job in fleet.get("/v1/jobs", queue="blue")["items"]] == [waiting]
    both = fleet.get("/v1/jobs", state="running,queued")["items"]
    assert [job["id"] for job in both] == [waiting, running]
