"""Every method of the client against the application, so that the two stay consistent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ebbtide.client import Client, ProblemError, etag_of
from tests.api.conftest import JOB

if TYPE_CHECKING:
    from tests.api.conftest import ApiService


@pytest.fixture
def client(fleet: ApiService) -> Iterator[Client]:
    with Client("http://service", transport=fleet.transport) as client:
        yield client


def test_a_job_from_dry_run_to_cancellation(fleet: ApiService, client: Client) -> None:
    document = {**JOB, "gpus": {"min": 1, "max": 1}, "steps": 100}
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


def test_overview_and_waiting_jobs(fleet: ApiService, client: Client) -> None:
    client.submit({**JOB, "name": "huge", "gpus": {"min": 64, "max": 64}, "steps": 100})
    fleet.tick()
    overview = client.overview()
    assert {node["name"] for node in overview["nodes"]} == {"i0", "i1", "t0"}
    client.cordon("t0")
    fleet.tick()
    assert [node["name"] for node in client.overview(generation=overview["generation"])["nodes"]] == ["t0"]
    assert [job["name"] for job in client.waiting(limit=1)["items"]] == ["huge"]


def test_events_decisions_snapshot_and_plans(fleet: ApiService, client: Client) -> None:
    fleet.lend_all()
    assert [event["number"] for event in client.events(limit=2)] == [event["number"] for event in client.events()]
    assert {decision["kind"] for decision in client.decisions(limit=1)} >= {"LendNode"}
    assert client.snapshot()["generation"] == fleet.store.load().snapshot.generation
    assert client.plan({"model": "gpt2", "gpu": "a100-80g", "gpus": 1, "globalBatch": 4})["candidates"] > 0


def test_conditional_changes_fail_after_another_change(fleet: ApiService, client: Client) -> None:
    job_id = client.submit({**JOB, "gpus": {"min": 1, "max": 1}, "steps": 100})["id"]
    client.create_queue({"name": "blue"})
    read = client.job(job_id)
    changed = client.change_job(job_id, {"priority": 3}, if_match=etag_of(read))
    assert etag_of(changed) == etag_of(client.job(job_id)) != etag_of(read)
    pool, node, queue = (etag_of(view) for view in (client.pool("training"), client.node("t0"), client.queue("blue")))
    client.cordon("t0", if_match=node)
    client.change_queue("blue", {"weight": 2.0}, if_match=queue)
    stale: list[Callable[[], object]] = [
        lambda: client.scale(job_id, max_gpus=2, if_match=etag_of(read)),
        lambda: client.suspend(job_id, if_match=etag_of(read)),
        lambda: client.cancel(job_id, if_match=etag_of(read)),
        lambda: client.delete_pool("training", if_match=node),
        *(partial(change, "t0", if_match=node) for change in (client.drain, client.uncordon, client.delete_node)),
        lambda: client.delete_queue("blue", if_match=queue),
    ]
    for change in stale:
        with pytest.raises(ProblemError) as refused:
            change()
        assert refused.value.status == 412
    assert etag_of(client.pool("training")) == pool


def test_a_view_without_etag_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="view: it has no ETag"):
        etag_of({**client.pool("training")})


def test_field_errors_reach_the_caller(client: Client) -> None:
    with pytest.raises(ProblemError) as refused:
        client.submit({"name": "train", "gpus": {"min": 4, "max": 2}})
    assert refused.value.status == 422
    assert [(error.field, error.message) for error in refused.value.errors] == [
        ("gpus.max", "gpus.max: got 2; allowed: at least gpus.min, which is 4")
    ]
