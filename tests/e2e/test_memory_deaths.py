"""Jobs under a whole service really run out of memory.

One is replanned for what it uses, the other fails after three tries.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ebbtide.client.views import DecisionBodyView, EventView
from tests.e2e.service_harness import ServiceHarness, run_service

pytestmark = pytest.mark.e2e

RANK_SCRIPT = Path(__file__).with_name("memory_hungry_rank.py")
# Used memory as a multiple of the predicted peak. mini-gpt's fastest plan for two slots then does not fit, others do.
USED_FACTOR = 1.6


@pytest.mark.full
def test_out_of_memory_jobs_are_replanned_or_fail_after_three_tries(tmp_path: Path) -> None:
    with run_service(tmp_path) as service:
        service.open(nodes=2, gpus=2)
        model = {"model": "mini-gpt", "globalBatch": 12}
        modelled, unknown = _submit(service, "modelled", 2, **model), _submit(service, "unknown", 1)
        service.wait(lambda: _has_ended(service, modelled) and _has_ended(service, unknown))
        _check_replanned(service, modelled)
        _check_failed(service, unknown)
        service.end()


def _check_replanned(service: ServiceHarness, job_id: str) -> None:
    job = service.client.job(job_id)
    assert job["state"] == "succeeded", job["message"]
    assert job["account"]["failures"] == 0, "running out of memory does not count as a retry"
    deaths = job["memory"]["deaths"]
    memory_bytes = deaths[0]["gpu_memory_bytes"]
    assert 1 <= len(deaths) <= 2
    peaks = [started["plan"]["peak_bytes_per_gpu"] for started in _started(service, job_id)]
    assert peaks == sorted(set(peaks), reverse=True), "each plan needs less memory than the previous one"
    assert [death["predicted_bytes"] for death in deaths] == peaks[:-1]
    assert peaks[-1] * USED_FACTOR <= memory_bytes < peaks[-2] * USED_FACTOR
    assert job["memory"]["factor"] * peaks[-1] <= memory_bytes < job["memory"]["factor"] * peaks[-2]
    message = _pauses(service, job_id)[0]["message"]
    assert deaths[0]["plan"] in message
    assert "2 GPUs" in message
    assert "1.3 GB" in message
    assert "10 s" in message
    _check_back_off(service, job_id, tries=len(peaks))


def _check_failed(service: ServiceHarness, job_id: str) -> None:
    job = service.client.job(job_id)
    assert (job["state"], job["account"]["failures"], len(job["memory"]["deaths"])) == ("failed", 0, 3)
    assert "out of memory" in job["message"]
    assert "can't allocate memory: you tried to allocate 200000000 bytes" in job["message"]
    assert service.client.explanation(job_id)["summary"] == job["message"]
    _check_back_off(service, job_id, tries=3)


def _check_back_off(service: ServiceHarness, job_id: str, *, tries: int) -> None:
    started, pauses = service.events(job_id, "JobStarted"), _pauses(service, job_id)
    assert (len(started), len(pauses)) == (tries, tries - 1)
    for again, pause, back_off_s in zip(started[1:], pauses, (10.0, 20.0)[: tries - 1], strict=True):
        assert again["at_s"] - pause["at_s"] >= back_off_s


def _started(service: ServiceHarness, job_id: str) -> list[DecisionBodyView]:
    decisions = service.client.decisions()
    return [each["decision"] for each in decisions if (each["kind"], each["subject"]) == ("StartJob", job_id)]


def _pauses(service: ServiceHarness, job_id: str) -> list[EventView]:
    return [event for event in service.events(job_id, "JobState") if "-> planning: out of memory" in event["message"]]


def _has_ended(service: ServiceHarness, job_id: str) -> bool:
    return service.client.job(job_id)["state"] in ("succeeded", "failed", "cancelled", "rejected")


def _submit(service: ServiceHarness, name: str, gpus: int, **more: object) -> str:
    command = [sys.executable, str(RANK_SCRIPT), str(USED_FACTOR)]
    document = {"name": name, "gpus": {"min": gpus, "max": gpus}, "steps": 10, "command": command, **more}
    return str(service.client.submit(document)["id"])
