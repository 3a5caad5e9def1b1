"""Webhook and simulation commands against the real API on a real database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cli.exit_codes import ExitCode
from ebbtide.client import Client
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.unit.cli.conftest import AppTransport, InProcessService

Ask = Callable[..., Any]
Run = Callable[..., Result]
HOOK = "https://hooks.example/ebbtide"
HEAD = "job_id,submit_time_s,duration_s,gpus\n"
CLUSTER = "pools: [{name: training, kind: training, nodes: 1, gpus_per_node: 8, gpu: a100-80g}]\n"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessService]:
    url = f"sqlite:///{tmp_path}/service.sqlite"
    migrate(url)
    store = SqlStore(url)
    made = InProcessService(store)
    monkeypatch.setattr("ebbtide.client.Client", partial(Client, transport=AppTransport(made.app)))
    yield made
    store.close()


def test_webhook_is_created_shown_tested_and_deleted(ask: Ask, run: Run) -> None:
    made = ask("webhooks", "create", HOOK, "--code", "JobStarted", "--queue", "vision")
    assert made["secret"].startswith("whsec_")
    assert (made["codes"], made["queue"], made["enabled"]) == (["JobStarted"], "vision", True)
    (listed,) = ask("webhooks")
    assert listed == ask("webhooks", "show", made["id"]) == {name: made[name] for name in made if name != "secret"}
    assert "JobStarted of queue vision" in run("webhooks").stdout
    asked = ask("webhooks", "test", made["id"])
    (delivery,) = ask("webhooks", "deliveries", made["id"], "--state", "pending")
    assert (delivery["id"], delivery["code"], delivery["attempts"]) == (asked["id"], "Test", 0)
    assert asked["id"] in run("webhooks", "deliveries", made["id"]).stdout
    rotated = ask("webhooks", "rotate-secret", made["id"])
    assert rotated["secret"] != made["secret"]
    assert rotated["old_secret_until_s"] > rotated["created_at_s"]
    refused = run("webhooks", "redeliver", made["id"], asked["id"])
    assert (refused.exit_code, "pending" in refused.stderr) == (ExitCode.REFUSED, True)
    assert ask("webhooks", "delete", made["id"])["deleted"]
    assert ask("webhooks") == []
    assert run("webhooks", "show", made["id"]).exit_code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["http://127.0.0.1/x"], "127.0.0.1"),
        (["http://[::ffff:10.0.0.1]/x"], "10.0.0.1"),
        (["https://localhost/x"], "localhost"),
        (["ftp://hooks.example"], "http:// or https://"),
        (["https://me:secret@hooks.example"], "url: "),
        ([HOOK, "--code", "JobStartet"], "did you mean 'JobStarted'?"),
        ([HOOK, "--queue", "No Queue"], "No Queue"),
    ],
)
def test_invalid_webhook_is_rejected(run: Run, service: InProcessService, given: list[str], told: str) -> None:
    refused = run("webhooks", "create", *given)
    assert refused.exit_code == 2
    assert told in " ".join(refused.stderr.split())


def test_simulation_is_submitted_listed_and_cancelled(ask: Ask, run: Run, tmp_path: Path) -> None:
    jobs, cluster = tmp_path / "jobs.csv", tmp_path / "cluster.yaml"
    jobs.write_text(f"{HEAD}a,0,100,1\nb,10,50,2\n")
    cluster.write_text(CLUSTER)
    given = ["simulations", "submit", "--jobs", str(jobs), "--cluster", str(cluster)]
    made = ask(*given, "--policy", "fifo,ebbtide", "--seed", "3")
    assert (made["state"], made["policies"], made["seed"]) == ("queued", ["fifo", "ebbtide"], 3)
    assert made["progress"] == {"fraction": 0.0, "jobs_done": 0, "jobs_total": 4, "playing": ""}
    assert ask("simulations") == [made] == [ask("simulations", "show", made["id"])]
    assert "fifo, ebbtide" in run("simulations").stdout
    refused = run("simulations", "report", made["id"])
    assert (refused.exit_code, "queued" in refused.stderr) == (ExitCode.REFUSED, True)
    assert ask("simulations", "cancel", made["id"])["state"] == "cancelled"
    watched = run("simulations", "watch", made["id"])
    assert watched.exit_code == 1
    assert f"simulation {made['id']} was cancelled" in watched.stderr
    jobs.write_text(f"{HEAD}a,0,100,none\n")
    refused = run(*given)
    assert refused.exit_code == 2
    assert "jobs.csv line 2: gpus: " in refused.stderr
