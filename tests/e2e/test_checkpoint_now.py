"""A checkpoint now, of a real training under a whole service: every rank saves, goes on, and the service sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.trainer.checkpoint_manifest import list_checkpoint_steps
from tests.e2e.service_play import ServicePlay, service_play

pytestmark = pytest.mark.e2e


def test_a_running_training_saves_when_it_is_asked_to_and_goes_on(tmp_path: Path) -> None:
    with service_play(tmp_path) as play:
        play.open(nodes=1, gpus=2)
        trainer = ["python", "-m", "scheduler.trainer.train", "--global-batch", "4", "--step-delay-s", "0.1"]
        document = {"name": "train", "gpus": {"min": 2, "max": 2}, "steps": 100_000, "command": trainer}
        job = str(play.client.submit({**document, "checkpoint": {"interval": "10h"}})["id"])
        play.wait(lambda: _steps(play, job) >= 3)
        folder = tmp_path / f"run/jobs/{job}/checkpoints"
        assert not list(list_checkpoint_steps(folder))

        first = _saved(play, job)
        assert list(list_checkpoint_steps(folder)) == [first]
        play.wait(lambda: _steps(play, job) >= first + 3)
        assert list(list_checkpoint_steps(folder)) == [first], "one wish is one checkpoint"
        second = _saved(play, job)
        assert list(list_checkpoint_steps(folder)) == [second, first]
        found = play.client.job(job)
        assert (found["generation"], found["account"]["resizes"], found["state"]) == (1, 0, "running")
        assert found["progress"]["checkpoint_steps"] == second
        play.client.cancel(job)
        play.wait(lambda: play.client.job(job)["state"] == "cancelled")
        play.end()


def _saved(play: ServicePlay, job: str) -> int:
    """The step of the checkpoint that is asked for twice now, once it is complete."""
    done = _steps(play, job)
    assert play.client.checkpoint(job)["awaited"] is not None
    play.client.checkpoint(job)
    play.wait(lambda: play.client.checkpoints(job)["awaited"] is None)
    latest = play.client.checkpoints(job)["latest"]
    assert latest is not None
    assert latest["step"] >= done
    return latest["step"]


def _steps(play: ServicePlay, job: str) -> int:
    """As rank 0 says."""
    status = play.run_dir(job, 1) / "status-0.json"
    return int(json.loads(status.read_text())["step"]) if status.exists() else 0
