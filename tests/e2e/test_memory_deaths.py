"""Jobs under a whole service whose ranks really run out of memory: one is planned anew for what it takes, and one that
nothing can help has failed after three tries, with a reason that its owner reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.event_views import DecisionBodyView, EventView
from tests.e2e.service_play import ServicePlay, service_play

pytestmark = pytest.mark.e2e

RANK_SCRIPT = Path(__file__).with_name("hungry_rank.py")
TRUTH = 1.6
"""Times the predicted peak. mini-gpt's fastest plan on two slots is then too large for them, thriftier ones are not."""


def test_jobs_that_die_of_memory_are_planned_by_what_they_take_or_fail_after_three_tries(tmp_path: Path) -> None:
    with service_play(tmp_path) as play:
        play.open(nodes=2, gpus=2)
        model = {"model": "mini-gpt", "globalBatch": 12}
        modelled, unknown = _submit(play, "modelled", 2, **model), _submit(play, "unknown", 1)
        play.wait(lambda: _has_ended(play, modelled) and _has_ended(play, unknown))
        _check_planned_anew(play, modelled)
        _check_failed(play, unknown)
        play.end()


def _check_planned_anew(play: ServicePlay, job_id: str) -> None:
    job = play.client.job(job_id)
    assert job["state"] == "succeeded", job["message"]
    assert job["account"]["failures"] == 0, "a death by memory costs no retry"
    deaths = job["memory"]["deaths"]
    memory_bytes = deaths[0]["gpu_memory_bytes"]
    assert 1 <= len(deaths) <= 2
    peaks = [started["plan"]["peak_bytes_per_gpu"] for started in _started(play, job_id)]
    assert peaks == sorted(set(peaks), reverse=True), "each plan is thriftier than the one before"
    assert [death["predicted_bytes"] for death in deaths] == peaks[:-1]
    assert peaks[-1] * TRUTH <= memory_bytes < peaks[-2] * TRUTH
    assert job["memory"]["factor"] * peaks[-1] <= memory_bytes < job["memory"]["factor"] * peaks[-2]
    first = _pauses(play, job_id)[0]["message"]
    assert f"out of memory, try 1 of 3: {deaths[0]['plan']} on 2 GPUs (1.3 GB predicted, " in first
    assert "times the predicted ones, and it pauses for 10 s; rank " in first
    _check_back_off(play, job_id, tries=len(peaks))


def _check_failed(play: ServicePlay, job_id: str) -> None:
    job = play.client.job(job_id)
    assert (job["state"], job["account"]["failures"], len(job["memory"]["deaths"])) == ("failed", 0, 3)
    assert job["message"].startswith("out of memory 3 times: 1. dp1 · 1 micro-batch on 1 GPU (nothing predicted, ")
    assert "can't allocate memory: you tried to allocate 200000000 bytes" in job["message"]
    assert play.client.explanation(job_id)["summary"] == job["message"]
    _check_back_off(play, job_id, tries=3)


def _check_back_off(play: ServicePlay, job_id: str, *, tries: int) -> None:
    started, pauses = play.events(job_id, "JobStarted"), _pauses(play, job_id)
    assert (len(started), len(pauses)) == (tries, tries - 1)
    for again, pause, back_off_s in zip(started[1:], pauses, (10.0, 20.0)[: tries - 1], strict=True):
        assert again["at_s"] - pause["at_s"] >= back_off_s


def _started(play: ServicePlay, job_id: str) -> list[DecisionBodyView]:
    told = (one for one in play.client.decisions() if (one["kind"], one["subject"]) == ("StartJob", job_id))
    return [one["decision"] for one in told]


def _pauses(play: ServicePlay, job_id: str) -> list[EventView]:
    return [event for event in play.events(job_id, "JobState") if "-> planning: out of memory" in event["message"]]


def _has_ended(play: ServicePlay, job_id: str) -> bool:
    return play.client.job(job_id)["state"] in ("succeeded", "failed", "cancelled", "rejected")


def _submit(play: ServicePlay, name: str, gpus: int, **more: object) -> str:
    command = ["python", str(RANK_SCRIPT), str(TRUTH)]
    document = {"name": name, "gpus": {"min": gpus, "max": gpus}, "steps": 10, "command": command, **more}
    return str(play.client.submit(document)["id"])
