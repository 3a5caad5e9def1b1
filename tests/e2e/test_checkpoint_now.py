"""A checkpoint on request under a whole service: every rank saves and continues, and the service reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.trainer.checkpoint_manifest import list_checkpoint_steps
from tests.e2e.service_harness import ServiceHarness, run_service

pytestmark = pytest.mark.e2e


@pytest.mark.full
def test_running_training_saves_on_request_and_continues(tmp_path: Path) -> None:
    with run_service(tmp_path) as service:
        service.open(nodes=1, gpus=2)
        trainer = ["python", "-m", "scheduler.trainer.train", "--global-batch", "4", "--step-delay-s", "0.1"]
        document = {"name": "train", "gpus": {"min": 2, "max": 2}, "steps": 100_000, "command": trainer}
        job = str(service.client.submit({**document, "checkpoint": {"interval": "10h"}})["id"])
        service.wait(lambda: _steps(service, job) >= 3 and service.client.job(job)["state"] == "running")
        folder = service.folders.checkpoint_dir(job)
        assert not list(list_checkpoint_steps(folder))

        first = _saved(service, job)
        assert list(list_checkpoint_steps(folder)) == [first]
        service.wait(lambda: _steps(service, job) >= first + 3)
        assert list(list_checkpoint_steps(folder)) == [first], "each request is one checkpoint"
        second = _saved(service, job)
        assert list(list_checkpoint_steps(folder)) == [second, first]
        view = service.client.job(job)
        assert (view["generation"], view["account"]["resizes"], view["state"]) == (1, 0, "running")
        assert view["progress"]["checkpoint_steps"] == second
        service.client.cancel(job)
        service.wait(lambda: service.client.job(job)["state"] == "cancelled")
        service.end()


def _saved(service: ServiceHarness, job: str) -> int:
    """Request a checkpoint twice, wait until it is complete, and return its step."""
    done = _steps(service, job)
    assert service.client.checkpoint(job)["awaited"] is not None
    service.client.checkpoint(job)
    service.wait(lambda: service.client.checkpoints(job)["awaited"] is None)
    latest = service.client.checkpoints(job)["latest"]
    assert latest is not None
    assert latest["step"] >= done
    return latest["step"]


def _steps(service: ServiceHarness, job: str) -> int:
    """Return the step in the status of rank 0."""
    return int(service.status(job, 1)["step"])
