"""Orders to the agent of a machine, as far as no store is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from api.http.dependencies import Service
from api.machine_reports import OrderBuilder
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import AgentReport, BegunRun, RankReport, Run, RunPhase
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


@pytest.mark.parametrize("is_ended", [False, True])
def test_end_of_a_run_that_another_process_has_handed_out_is_kept_until_it_is_recorded(*, is_ended: bool) -> None:
    """The cached list of begun runs is older than the run, which has ended at once."""
    job = a_job("job", 1, state=JobState.STARTING, on={"t0": (0,)})
    generation, plan = job.allocation.generation, job.allocation.plan
    assert plan is not None
    end = Run("job", generation, RunPhase.FAILED) if is_ended else None
    run = BegunRun("job", generation, {"t0": (0,)}, (("t0", 0),), 0.0, {"t0": "agent"}, plan, end=end)
    state = SimpleNamespace(job=lambda *_: job, begun_runs=lambda *_: (), record_report=lambda _: None)
    log = SimpleNamespace(list_begun_runs_of=lambda _: (run,))
    service = cast("Service", SimpleNamespace(agent_state=state, run_log=log))
    report = AgentReport("job", "t0", "agent", 0.0, generation, (RankReport(0, 1),))
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job])
    [order] = OrderBuilder(service, snapshot, 0.0).build_orders({}, (report,))
    assert order["is_recorded"] is is_ended
