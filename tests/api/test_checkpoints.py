"""Checkpoints on request: requested over HTTP, saved by the executor, visible in responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


def test_a_requested_checkpoint_is_reported_when_complete(fleet: ApiService) -> None:
    job = fleet.submit()
    fleet.tick()
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job}/checkpoints")["latest"] is None
    asked = fleet.made(f"/v1/jobs/{job}:checkpoint")
    assert asked["awaited"] == {"asked_at_s": fleet.clock.now_s(), "step_min": None}
    waiting = fleet.store.count_pending_commands()
    assert fleet.made(f"/v1/jobs/{job}:checkpoint") == asked
    assert fleet.store.count_pending_commands() == waiting, "it is not asked for again while it is waited for"
    fleet.tick()  # the command is applied
    fleet.tick()  # the checkpoint is saved and observed
    done = fleet.get(f"/v1/jobs/{job}/checkpoints")
    assert (done["awaited"], done["latest"]["completed_at_s"]) == (None, fleet.clock.now_s())
    assert fleet.get(f"/v1/jobs/{job}/progress")["checkpoint_steps"] == done["latest"]["step"] > 0
    fleet.made(f"/v1/jobs/{job}:checkpoint")
    assert fleet.store.count_pending_commands() == 1, "the next request is a new one"


def test_only_a_running_job_can_save_a_checkpoint(fleet: ApiService, problem: Problem) -> None:
    job = fleet.submit()
    refused = problem(fleet.post(f"/v1/jobs/{job}:checkpoint"), 409)
    assert refused["type"].endswith(":conflict")
    fleet.tick()
    fleet.http.delete(f"/v1/jobs/{job}")
    fleet.tick()
    problem(fleet.post(f"/v1/jobs/{job}:checkpoint"), 409)
    assert fleet.get(f"/v1/jobs/{job}/checkpoints")["awaited"] is None
    problem(fleet.post("/v1/jobs/nobody:checkpoint"), 404)
