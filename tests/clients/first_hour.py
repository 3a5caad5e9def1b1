"""The first hour with a service through the client that openapi-python-client generated.

`first_hour.py URL TOKEN` runs in the generators' environment, with the generated package on PYTHONPATH and nothing of
Ebbtide. It prints the number of calls. Every answer must have the documented type.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from io import BytesIO
from typing import Any, TypeVar

from ebbtide_client import AuthenticatedClient, models
from ebbtide_client.api.fleet import add_node, create_pool, get_overview, list_nodes, list_pools, list_waiting
from ebbtide_client.api.identity import create_token, list_audit, list_tokens, revoke_token, who_am_i
from ebbtide_client.api.jobs import (
    cancel_job,
    change_job,
    dry_run_job,
    explain_job,
    get_checkpoints,
    get_job,
    get_job_history,
    get_job_progress,
    get_logs,
    list_job_events,
    list_jobs,
    resume_job,
    submit_job,
    suspend_job,
    upload_archive,
)
from ebbtide_client.api.lending import list_loans
from ebbtide_client.api.machines import list_machines
from ebbtide_client.api.plans import solve_plan
from ebbtide_client.api.queues import create_queue, list_queues
from ebbtide_client.api.record import get_latest_snapshot, list_decisions, list_events
from ebbtide_client.api.service import get_health, get_metrics, get_readiness
from ebbtide_client.api.simulations import list_simulations
from ebbtide_client.api.usage import get_usage
from ebbtide_client.api.webhooks import create_webhook, delete_webhook, list_webhooks
from ebbtide_client.types import File

TIMEOUT_S = 60.0
ARCHIVE_DIGEST = "sha256:0eb3e36bfb24dcd9bb1d1bece1531216b59539a8fde17ee80224af0653c92aa3"
"""Of the bytes `archive`, in lower case."""
T = TypeVar("T")


class FirstHour:
    """Calls of one client. Counts them, and refuses every answer that is not of the expected type and status."""

    def __init__(self, url: str, token: str) -> None:
        self.client = AuthenticatedClient(base_url=url, token=token, raise_on_unexpected_status=True)
        self.calls = 0

    def call(self, operation: Any, expected: type[T], *words: str, status: int = 200, **arguments: Any) -> T:
        self.calls += 1
        answer = operation.sync_detailed(*words, client=self.client, **arguments)
        name = operation.__name__
        assert answer.status_code == status, (name, answer.status_code, answer.content)
        assert isinstance(answer.parsed, expected), (name, answer.parsed)
        return answer.parsed

    def refuse(self, operation: Any, status: int, *words: str, **arguments: Any) -> models.Problem:
        return self.call(operation, models.Problem, *words, status=status, **arguments)

    def wait(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not reached():
            assert time.monotonic() < deadline_s, "the state was not reached"
            time.sleep(0.1)


def look_around(hour: FirstHour) -> None:
    hour.call(get_health, models.HealthView)
    hour.call(get_readiness, models.ReadyView)
    hour.call(get_metrics, str)
    assert hour.call(who_am_i, models.WhoAmIView).name == "root"
    hour.call(get_overview, models.OverviewView)


def set_up_fleet(hour: FirstHour) -> None:
    pool = models.PoolDocument.from_dict({"name": "training", "kind": "training"})
    node = models.NodeDocument.from_dict({"name": "n0", "pool": "training", "gpu": "cpu", "gpus": 2})
    queue = models.QueueDocument.from_dict({"name": "research", "guaranteed_gpus": 1})
    for operation, view, document in (
        (create_pool, models.PoolView, pool),
        (add_node, models.NodeView, node),
        (create_queue, models.QueueView, queue),
    ):
        hour.call(operation, view, status=201, body=document)
        hour.wait(lambda: hour.call(get_readiness, models.ReadyView).inbox_commands == 0)
        hour.call(operation, view, status=200, body=document)  # a repetition changes nothing
    assert [item.name for item in hour.call(list_pools, models.PoolPage).items] == ["training"]
    assert [item.name for item in hour.call(list_nodes, models.NodePage).items] == ["n0"]
    assert "research" in [item.name for item in hour.call(list_queues, models.QueuePage).items]
    hour.call(list_machines, models.MachinePage)


def run_job(hour: FirstHour) -> None:
    document = {"name": "hello", "gpus": {"min": 1, "max": 2}, "command": ["sleep", "600"], "queue": "research"}
    body = models.JobDocument.from_dict(document)
    hour.call(dry_run_job, models.DryRunView, body=body)
    job = hour.call(submit_job, models.JobView, status=201, body=body, idempotency_key="first-hour")
    again = hour.call(submit_job, models.JobView, status=201, body=body, idempotency_key="first-hour")
    assert again.id == job.id
    hour.wait(lambda: hour.call(get_job, models.JobView, job.id).state == "running")
    assert [item.id for item in hour.call(list_jobs, models.JobPage, state="live").items] == [job.id]
    assert hour.call(explain_job, models.ExplanationView, job.id).summary
    assert hour.call(get_job_progress, models.ProgressView, job.id).checkpoint_steps == 0
    hour.call(get_job_history, models.JobHistoryView, job.id)
    hour.call(get_checkpoints, models.CheckpointsView, job.id)
    hour.call(get_logs, models.LogPageView, job.id)
    assert hour.call(list_job_events, models.EventPage, job.id).items
    hour.call(suspend_job, models.JobView, job.id, status=202)
    hour.call(resume_job, models.JobView, job.id, status=202)
    change = models.JobChange.from_dict({"gpus": {"max": 1}})
    assert hour.call(change_job, models.JobView, job.id, status=202, body=change).gpus.max_ == 1
    hour.call(cancel_job, models.JobView, job.id, status=202)
    hour.wait(lambda: hour.call(get_job, models.JobView, job.id).state == "cancelled")
    assert hour.refuse(suspend_job, 409, job.id).type_ == "urn:ebbtide:problem:conflict"
    assert hour.refuse(get_job, 404, "ghost").status == 404
    wrong = models.JobDocument.from_dict({**document, "gpus": {"min": 4, "max": 2}})
    assert hour.refuse(submit_job, 422, body=wrong).errors


def read_records(hour: FirstHour) -> None:
    hour.call(list_waiting, models.WaitingView)
    hour.call(list_loans, models.LoanPage)
    assert hour.call(list_events, models.EventPage).items
    hour.call(list_decisions, models.DecisionPage)
    hour.call(get_latest_snapshot, models.SnapshotView)
    hour.call(get_usage, models.UsageReportView)
    hour.call(list_simulations, models.SimulationPage)


def administer(hour: FirstHour) -> None:
    document = models.TokenDocument.from_dict({"name": "ci", "grants": ["viewer"]})
    token = hour.call(create_token, models.TokenView, status=201, body=document)
    assert len(hour.call(list_tokens, models.TokenPage).items) >= 2
    hour.call(revoke_token, models.TokenView, token.id)
    webhook = models.WebhookDocument.from_dict({"url": "https://hooks.example.com/ebbtide"})
    created = hour.call(create_webhook, models.WebhookSecretView, status=201, body=webhook)
    hour.call(list_webhooks, models.WebhookPage)
    hour.client.get_httpx_client().delete(f"/v1/webhooks/{created.id}").raise_for_status()
    assert hour.call(list_audit, models.AuditPage).items
    assert delete_webhook.sync_detailed(created.id, client=hour.client).status_code == 404


def solve_and_upload(hour: FirstHour) -> None:
    request = {"model": "tiny-gpt", "gpu": "cpu", "gpus": 2, "globalBatch": 12}
    plan = hour.call(solve_plan, models.SolvedPlanView, body=models.PlanRequestDocument.from_dict(request))
    assert plan.search_time_s > 0
    stored = hour.call(
        upload_archive, models.ArchiveView, ARCHIVE_DIGEST, status=201, body=File(payload=BytesIO(b"archive"))
    )
    assert stored.bytes_ == 7


def main() -> None:
    hour = FirstHour(*sys.argv[1:])
    for part in (look_around, set_up_fleet, run_job, read_records, administer, solve_and_upload):
        part(hour)
    print(hour.calls)


if __name__ == "__main__":
    main()
