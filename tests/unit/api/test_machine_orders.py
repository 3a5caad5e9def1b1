"""Orders to the agent of a machine, as far as no store is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from api.http.dependencies import Service
from api.machine_reports import OrderBuilder
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import AgentReport
from scheduler.domain.run_document import RunDocument
from scheduler.settings import Settings
from tests.builders import a_fleet, a_job, a_snapshot


def test_run_document_states_the_limit_of_archives() -> None:
    job = a_job("job", 1, state=JobState.STARTING, on={"t0": (0,)})
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job])
    state = SimpleNamespace(job=lambda *_: job, begun_runs=lambda *_: ())
    settings = Settings(archive_bytes_max=12_345)
    service = cast("Service", SimpleNamespace(agent_state=state, settings=settings, token_secret=b"s" * 32))
    wanted = {("job", "t0"): AgentReport("job", "t0", "agent", 0.0)}
    [order] = OrderBuilder(service, snapshot, 0.0).build_orders(wanted, ())
    assert order["document"] is not None
    assert RunDocument.from_document(order["document"]).archive_bytes_max == 12_345
