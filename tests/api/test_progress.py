"""Workers report progress with their token and get notices in the reply."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from scheduler.domain.commands import ReportProgress
from scheduler.domain.worker_token import issue_worker_token
from scheduler.settings import Settings
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import LoadedState, UnavailableError
from tests.api.conftest import ApiService

if TYPE_CHECKING:
    from tests.api.conftest import Problem

SECRET = b"a secret that only tests know...."
REPORT: dict[str, Any] = {
    "generation": 1, "step": 12, "loss": 3.5, "samples_per_s": 8.0, "checkpoint_step": 10,
    "peak_bytes": 70_000_000_000,
}  # fmt: skip


class UnavailableStore(MemoryStore):
    """A store that is unavailable."""

    def load(self) -> LoadedState:
        raise UnavailableError("gone")


def running(fleet: ApiService) -> tuple[str, str]:
    """Return a running job of generation 1 and the token of its workers."""
    job_id = fleet.submit()
    fleet.tick()
    fleet.tick()
    return job_id, issue_worker_token(SECRET, job_id, 1)


def test_a_report_is_sent_to_the_inbox_without_notice(fleet: ApiService) -> None:
    job_id, token = running(fleet)
    answer = fleet.post(f"/v1/jobs/{job_id}/progress", REPORT, token=token)
    assert answer.json() == {"notice": None}
    [command] = fleet.store.load().inbox
    assert command.body == ReportProgress(job_id, 1, 12.0, 3.5, 10.0, 8.0, 70_000_000_000)
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}/progress")["loss"] == 3.5
    assert fleet.get(f"/v1/jobs/{job_id}/progress")["checkpoint_steps"] == 10
    progress = fleet.get(f"/v1/jobs/{job_id}")["progress"]
    assert (progress["samples_per_s"], progress["peak_bytes"]) == (8.0, 70_000_000_000)
    assert job_id not in fleet.http.get("/metrics").text
    by_job = Settings(auth="off", allowed_hosts="service", metrics_by_job=True)
    fleet.app.state.service = replace(fleet.app.state.service, settings=by_job)
    metrics = fleet.http.get("/metrics").text
    assert f'ebbtide_job_samples_per_s{{job="{job_id}"}} 8.0' in metrics
    assert f'ebbtide_job_peak_bytes{{job="{job_id}"}} 7e+10' in metrics.replace("e+0", "e+")


def test_a_repeated_report_adds_no_command(fleet: ApiService) -> None:
    job_id, token = running(fleet)
    for _ in range(3):
        assert fleet.post(f"/v1/jobs/{job_id}/progress", REPORT, token=token).status_code == 200
    assert fleet.store.count_pending_commands() == 1


def test_frozen_layers_may_only_grow(fleet: ApiService, problem: Problem) -> None:
    job_id, token = running(fleet)
    assert fleet.post(f"/v1/jobs/{job_id}/progress", REPORT | {"frozen_layers": 4}, token=token).status_code == 200
    fleet.post(f"/v1/jobs/{job_id}/progress", REPORT, token=token)
    assert fleet.store.count_pending_commands() == 2
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}/progress")["frozen_layers"] == 4
    lower = fleet.post(f"/v1/jobs/{job_id}/progress", REPORT | {"frozen_layers": 3}, token=token)
    [error] = problem(lower, 422)["errors"]
    assert (error["field"], error["value"]) == ("frozen_layers", 3)
    assert "at least 4" in error["allowed"]


def test_workers_of_a_suspended_job_get_leave(fleet: ApiService) -> None:
    job_id, token = running(fleet)
    fleet.post(f"/v1/jobs/{job_id}:suspend")
    fleet.tick()
    notice = fleet.post(f"/v1/jobs/{job_id}/progress", REPORT, token=token).json()["notice"]
    assert notice["action"] == "leave"
    assert notice["step"] is None
    assert notice["seconds_left"] > 0
    assert fleet.store.count_pending_commands() == 0


def test_workers_of_an_older_generation_get_replan(fleet: ApiService) -> None:
    job_id, token = running(fleet)
    fleet.http.patch(f"/v1/jobs/{job_id}", json={"gpus": {"max": 1}})
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["generation"] == 2
    notice = fleet.post(f"/v1/jobs/{job_id}/progress", REPORT, token=token).json()["notice"]
    assert notice["action"] == "replan"
    newer = issue_worker_token(SECRET, job_id, 2)
    report = REPORT | {"generation": 2}
    assert fleet.post(f"/v1/jobs/{job_id}/progress", report, token=newer).json() == {"notice": None}


def test_workers_of_an_ended_job_get_leave(fleet: ApiService) -> None:
    job_id, token = running(fleet)
    fleet.http.delete(f"/v1/jobs/{job_id}")
    for _ in range(3):
        fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["state"] == "cancelled"
    assert fleet.post(f"/v1/jobs/{job_id}/progress", REPORT, token=token).json()["notice"]["action"] == "leave"


def test_a_wrong_token_is_refused_before_any_read(problem: Problem) -> None:
    service = ApiService(store=UnavailableStore())
    problem(service.post("/v1/jobs/train-1/progress", REPORT, token="ebt_nonsense"), 403)
    right = issue_worker_token(SECRET, "train-1", REPORT["generation"])
    problem(service.post("/v1/jobs/train-1/progress", REPORT, token=right), 503)


def test_a_report_without_a_token_is_a_401(fleet: ApiService, problem: Problem) -> None:
    job_id, _ = running(fleet)
    answer = fleet.post(f"/v1/jobs/{job_id}/progress", REPORT)
    assert problem(answer, 401)["type"] == "urn:ebbtide:problem:unauthenticated"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert fleet.store.count_pending_commands() == 0


@pytest.mark.parametrize(("job", "generation"), [("other", 1), ("", 2), ("", 0)])
def test_the_token_of_another_job_or_generation_is_a_403(
    fleet: ApiService, problem: Problem, job: str, generation: int
) -> None:
    job_id, _ = running(fleet)
    token = issue_worker_token(SECRET, job or job_id, generation)
    problem(fleet.post(f"/v1/jobs/{job_id}/progress", REPORT, token=token), 403)
    problem(fleet.post(f"/v1/jobs/{job_id}/progress", REPORT, token="ebt_nonsense"), 403)
    assert fleet.store.count_pending_commands() == 0


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("generation", {"generation": -1}),
        ("step", {"step": -1}),
        ("step", {"step": 1.5}),
        ("samples_per_s", {"samples_per_s": -1}),
        ("checkpoint_step", {"checkpoint_step": "ten"}),
        ("peak_bytes", {"peak_bytes": -1}),
        ("peak_bytes", {"peak_bytes": 2**63}),
        ("mood", {"mood": "good"}),
    ],
)
def test_a_malformed_report_is_refused(fleet: ApiService, field: str, change: dict[str, Any]) -> None:
    assert (
        fleet.refused("POST", "/v1/jobs/any/progress", REPORT | change, token="ebt_any")["errors"][0]["field"] == field
    )


def test_a_nan_loss_is_refused(fleet: ApiService, problem: Problem) -> None:
    body = b'{"generation": 1, "step": 1, "loss": NaN}'
    headers = {"Content-Type": "application/json", "Authorization": "Bearer ebt_any"}
    answer = fleet.http.post("/v1/jobs/any/progress", content=body, headers=headers)
    assert problem(answer, 422)["errors"][0]["field"] == "loss"
