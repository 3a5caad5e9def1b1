"""Secrets over HTTP: who may set, list and delete them, who gets a value, and that nothing else contains it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.queue_secrets.missing_secrets import MissingSecretWatch
from scheduler.domain.commands import Command, DeleteSecret
from scheduler.domain.worker_token import issue_agent_token
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import JOB, SECRET, Problem

VALUE = "hf_3ZqLrXw8PfVnA1"
REFERENCE = [{"name": "hf-token", "env": "HF_TOKEN"}]


@pytest.fixture
def guarded(tmp_path: Path) -> AuthenticatedService:
    return AuthenticatedService(run_dir=tmp_path).with_fleet()


def put(
    guarded: AuthenticatedService, token: str, queue: str = "research", name: str = "hf-token", value: str = VALUE
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return guarded.http.put(f"/v1/queues/{queue}/secrets/{name}", content=value.encode(), headers=headers)


def submit(guarded: AuthenticatedService, token: str, **fields: Any) -> httpx.Response:
    document = {**JOB, "queue": "research", "steps": 1000, "secrets": REFERENCE, **fields}
    return guarded.request("POST", "/v1/jobs", token, document)


def fetch(guarded: AuthenticatedService, job_id: str, token: str, *, node: str = "t0", generation: int = 1) -> Any:
    query = f"node={node}&generation={generation}"
    return guarded.request("GET", f"/v1/jobs/{job_id}/secrets?{query}", token)


def test_roles(guarded: AuthenticatedService, problem: Problem) -> None:
    admin_of_one = guarded.token("quinn", "queue-admin:research")
    submitter, stranger = guarded.token("sam", "submitter:research"), guarded.token("vic", "queue-admin:vision")
    for token in (submitter, stranger):
        problem(put(guarded, token), 403)
    assert put(guarded, admin_of_one).json()["version"] == 1
    assert put(guarded, guarded.root).json()["version"] == 2
    listed = guarded.request("GET", "/v1/queues/research/secrets", submitter)
    assert [(each["name"], each["changed_by"]) for each in listed.json()["items"]] == [("hf-token", "root")]
    assert VALUE not in listed.text
    problem(guarded.request("GET", "/v1/queues/research/secrets", stranger), 403)
    problem(guarded.request("DELETE", "/v1/queues/research/secrets/hf-token", submitter), 403)
    assert guarded.request("DELETE", "/v1/queues/research/secrets/hf-token", admin_of_one).status_code == 200
    problem(guarded.request("DELETE", "/v1/queues/research/secrets/hf-token", admin_of_one), 404)


@pytest.mark.parametrize(
    ("queue", "name", "value", "status"),
    [("research", "hf-token", "qzjvk", 422), ("research", "hf-token", "x" * 65_537, 422),
     ("research", "HF_TOKEN", VALUE, 422), ("nowhere", "hf-token", VALUE, 404)],
)  # fmt: skip
def test_refusals_do_not_repeat_the_value(
    guarded: AuthenticatedService, problem: Problem, queue: str, name: str, value: str, status: int
) -> None:
    answer = put(guarded, guarded.root, queue, name, value)
    problem(answer, status)
    assert value not in answer.text


def test_job_names_only_secrets_of_its_own_queue(guarded: AuthenticatedService, problem: Problem) -> None:
    put(guarded, guarded.root, "vision")
    refused = problem(submit(guarded, guarded.root), 422)
    assert [error["field"] for error in refused["errors"]] == ["secrets.0.name"]
    assert submit(guarded, guarded.root, queue="vision").status_code == 201
    put(guarded, guarded.root)
    job_id = submit(guarded, guarded.root).json()["id"]
    assert guarded.request("GET", f"/v1/jobs/{job_id}", guarded.root).json()["spec"]["secrets"] == REFERENCE
    guarded.request("POST", "/v1/queues", guarded.root, {"name": "other"})
    problem(guarded.request("PATCH", f"/v1/jobs/{job_id}", guarded.root, {"queue": "other"}), 422)


@pytest.mark.parametrize(
    ("secrets", "field"),
    [
        ([{"name": "a"}], "secrets.0.env"),
        ([{"env": "A"}], "secrets.0.name"),
        ([{"name": "a", "env": "A", "file": "a"}], "secrets.0.env"),
        ([{"name": "a", "env": "RANK"}], "secrets.0.env"),
        ([{"name": "a", "file": "../a"}], "secrets.0.file"),
        ([{"name": "a", "env": "A"}, {"name": "b", "env": "A"}], "secrets.1.env"),
        ([{"name": "a", "env": "GIVEN"}], "secrets.0.env"),
        ([{"kubernetesSecret": {"name": "A_B", "key": "k"}, "env": "A"}], "secrets.0.kubernetesSecret.name"),
    ],
)
def test_invalid_references_are_refused(
    guarded: AuthenticatedService, problem: Problem, secrets: object, field: str
) -> None:
    refused = problem(submit(guarded, guarded.root, secrets=secrets, env={"GIVEN": "1"}), 422)
    assert [error["field"] for error in refused["errors"]] == [field]


def test_only_the_agent_that_may_run_the_job_gets_the_value(guarded: AuthenticatedService, problem: Problem) -> None:
    put(guarded, guarded.root)
    job_id = submit(guarded, guarded.root).json()["id"]
    other = submit(guarded, guarded.root, name="other", gpus={"min": 64, "max": 64}).json()["id"]
    guarded.tick()
    guarded.tick()
    agent = issue_agent_token(SECRET, job_id)
    got = fetch(guarded, job_id, agent)
    assert got.json() == {"values": {"hf-token": base64.b64encode(VALUE.encode()).decode()}}
    assert got.headers["Cache-Control"] == "no-store"
    problem(fetch(guarded, job_id, agent, node="t1"), 403)
    problem(fetch(guarded, job_id, agent, generation=9), 409)
    problem(fetch(guarded, job_id, issue_agent_token(SECRET, other)), 403)
    problem(fetch(guarded, other, issue_agent_token(SECRET, other)), 403)
    problem(fetch(guarded, job_id, guarded.root), 403)
    guarded.request("DELETE", "/v1/queues/research/secrets/hf-token", guarded.root)
    problem(fetch(guarded, job_id, agent), 409)


def test_a_job_whose_secret_cannot_be_decrypted_is_refused(
    guarded: AuthenticatedService, tmp_path: Path, problem: Problem
) -> None:
    put(guarded, guarded.root)
    (tmp_path / "secrets.key").unlink()
    refused = problem(submit(guarded, guarded.root), 409)
    assert "hf-token" in refused["detail"]
    assert str(tmp_path) not in refused["detail"]
    other = {**JOB, "queue": "research", "steps": 1000, "secrets": REFERENCE}
    problem(guarded.request("POST", "/v1/jobs:dry-run", guarded.root, other), 409)
    assert guarded.request("GET", "/v1/jobs", guarded.root).json()["items"] == []
    put(guarded, guarded.root)
    assert submit(guarded, guarded.root).status_code == 201


def test_a_started_job_whose_master_key_is_lost_waits_until_it_is_back(
    guarded: AuthenticatedService, tmp_path: Path, problem: Problem
) -> None:
    put(guarded, guarded.root)
    job_id, watch = submit(guarded, guarded.root).json()["id"], MissingSecretWatch(guarded.app.state.service)
    guarded.tick()
    key_file, agent = tmp_path / "secrets.key", issue_agent_token(SECRET, job_id)
    keys = key_file.read_bytes()
    key_file.unlink()
    refused = problem(fetch(guarded, job_id, agent), 409)
    assert "hf-token" in refused["detail"]
    assert str(tmp_path) not in refused["detail"]
    problem(fetch(guarded, job_id, agent), 409)
    assert guarded.store.count_pending_commands() == 1
    for content, missing in ((None, ("hf-token",)), (keys, ())):
        if content is not None:
            key_file.write_bytes(content)
        watch.check()
        guarded.tick()
        assert guarded.store.load().snapshot.jobs[job_id].missing_secrets == missing
    assert fetch(guarded, job_id, agent).status_code == 200


def test_a_lost_command_is_made_up_for(guarded: AuthenticatedService) -> None:
    """The service stored the value and ended before it could let the jobs start."""
    put(guarded, guarded.root)
    job_id = submit(guarded, guarded.root).json()["id"]
    guarded.store.send(Command("lost", guarded.clock.now_s(), DeleteSecret("research", "hf-token")))
    guarded.tick()
    assert guarded.store.load().snapshot.jobs[job_id].missing_secrets == ("hf-token",)
    MissingSecretWatch(guarded.app.state.service).check()
    guarded.tick()
    assert guarded.store.load().snapshot.jobs[job_id].missing_secrets == ()


def test_deleted_secret_is_a_reason_to_wait(guarded: AuthenticatedService) -> None:
    put(guarded, guarded.root)
    job_id = submit(guarded, guarded.root, gpus={"min": 1, "max": 1}).json()["id"]
    guarded.request("DELETE", "/v1/queues/research/secrets/hf-token", guarded.root)
    guarded.tick()
    assert guarded.request("GET", f"/v1/jobs/{job_id}", guarded.root).json()["state"] == "planning"
    explanation = guarded.request("GET", f"/v1/jobs/{job_id}/explanation", guarded.root).json()
    assert explanation["reason"]["code"] == "SecretMissing"
    put(guarded, guarded.root)
    guarded.tick()
    guarded.tick()
    assert guarded.request("GET", f"/v1/jobs/{job_id}", guarded.root).json()["state"] in ("starting", "running")


@pytest.mark.parametrize(
    ("name", "value", "is_warned"),
    [
        ("HF_TOKEN", "hf_3ZqLrXw8PfVnA1kdjfhskdjfhs", True),
        ("WANDB_API_KEY", "0a1b2c3d4e5f", True),
        ("DB_PASSWORD", "hunter22", True),
        ("ANY", "AKIAIOSFODNN7EXAMPLE", True),
        ("ANY", "ghp_" + "a" * 36, True),
        ("ANY", "sk-proj-" + "a" * 24, True),
        ("DATABASE", "postgresql://ada:hunter22@db/x", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("KEY_FILE", "/etc/keys/id_ed25519", False),
        ("MAX_TOKENS", "4096", False),
        ("SORT_KEY", "created", False),
        ("NCCL_DEBUG", "INFO", False),
    ],
)
def test_credentials_in_env_are_warned_about(
    guarded: AuthenticatedService, name: str, value: str, is_warned: bool
) -> None:
    document = {**JOB, "steps": 10, "env": {name: value}}
    created = guarded.request("POST", "/v1/jobs", guarded.root, document).json()
    dry_run = guarded.request("POST", "/v1/jobs:dry-run", guarded.root, document).json()
    for response in (created, dry_run):
        warnings = response.get("warnings", [])
        assert [f"env.{name}" in warning for warning in warnings] == [True] * is_warned
        assert not any(value in warning for warning in warnings)
