"""Every method of the client, against the application itself: the two cannot drift apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from api.client import Client, ProblemError

if TYPE_CHECKING:
    from tests.api.conftest import ApiService


@pytest.fixture
def client(fleet: ApiService) -> Iterator[Client]:
    with Client("http://service", transport=fleet.transport) as client:
        yield client


def test_a_job_from_dry_run_to_cancellation(fleet: ApiService, client: Client) -> None:
    document = {"name": "train", "gpus": {"min": 1, "max": 1}, "steps": 100}
    assert client.dry_run(document)["state"] == "starting"
    job_id = client.submit(document)["id"]
    fleet.tick()
    fleet.tick()
    assert client.job(job_id)["state"] == "running"
    assert client.job_plan(job_id)["stages"]
    assert client.progress(job_id)["steps_total"] == 100
    assert client.explanation(job_id)["job_id"] == job_id
    assert client.scale(job_id, max_gpus=2)["gpus"]["max"] == 2
    assert client.suspend(job_id)["intent"] == "suspend"
    assert client.resume(job_id)["intent"] == "run"
    assert client.cancel(job_id)["intent"] == "cancel"
    assert [job["id"] for job in client.jobs(limit=1)] == [job_id]
    assert list(client.job_events(job_id, limit=1)) == list(client.job_events(job_id))


def test_the_fleet_and_its_loans(fleet: ApiService, client: Client) -> None:
    assert client.create_pool({"name": "more", "kind": "training"})["name"] == "more"
    assert client.add_node({"name": "m0", "pool": "more", "gpu": "cpu", "gpus": 1})["pool"] == "more"
    assert [node["name"] for node in client.nodes(pool="more")] == ["m0"]
    assert client.node("m0") == client.nodes(pool="more")[0]
    assert client.cordon("m0")["cordoned"]
    assert client.drain("m0")["draining"]
    assert not client.uncordon("m0")["cordoned"]
    assert client.delete_node("m0")["name"] == "m0"
    assert client.delete_pool("more")["name"] == "more"
    assert [pool["name"] for pool in client.pools()] == ["inference", "training"]
    assert client.pool("inference")["kind"] == "inference"
    assert client.report_demand("inference", gpus=1.5)["gpus"] == 1.5
    latest = client.demand("inference")["latest"]
    assert latest
    assert latest["asked_gpus"] == 1.5
    assert client.forecast("inference")["forecast"] is None
    fleet.lend_all()
    assert [loan["node"] for loan in client.loans(state="active")] == ["i1", "i0"]
    assert client.pause_lending()["lending_paused"]
    assert client.recall_all()["loans_recalled"]
    assert not client.resume_lending()["lending_paused"]


def test_the_record_and_the_solver(fleet: ApiService, client: Client) -> None:
    fleet.lend_all()
    assert [event["number"] for event in client.events(limit=2)] == [event["number"] for event in client.events()]
    assert {decision["kind"] for decision in client.decisions(limit=1)} >= {"LendNode"}
    assert client.snapshot()["generation"] == fleet.store.load().snapshot.generation
    assert client.plan({"model": "gpt2", "gpu": "a100-80g", "gpus": 1, "globalBatch": 4})["candidates"] > 0


def test_a_refused_field_reaches_the_caller_as_a_sentence(client: Client) -> None:
    with pytest.raises(ProblemError) as refused:
        client.submit({"name": "train", "gpus": {"min": 4, "max": 2}})
    assert refused.value.status == 422
    assert [(error.field, error.message) for error in refused.value.errors] == [
        ("gpus.max", "gpus.max: got 2; allowed: at least gpus.min, which is 4")
    ]
