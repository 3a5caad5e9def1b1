"""The executor of machines with node agents: which nodes are down."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from scheduler.domain.job_state import JobState
from scheduler.domain.machine import Machine
from scheduler.domain.observation import AgentReport, RankReport
from scheduler.executors.agent_executor import CONTACT_MARGIN_S, UNREACHABLE_S, AgentExecutor, agent_id
from scheduler.executors.reported_runs import build_begun_run
from scheduler.executors.run_ledger import RunLedger
from tests.builders import a_fleet, a_job, a_snapshot
from tests.memory_run_log import MemoryRunLog

SEEN_S, DISCONNECT_S = 1000.0, 120.0
LOST_AFTER_S = DISCONNECT_S + CONTACT_MARGIN_S
MACHINES = tuple(
    Machine(name, (name,), "training", "cpu", "127.0.0.1", "0", 0.0, seen_at_s=SEEN_S, digest=f"{name}-digest")
    for name in ("t0", "t1")
)


@dataclass(frozen=True, slots=True)
class Directory:
    def list_machines(self) -> tuple[Machine, ...]:
        return MACHINES


@pytest.mark.parametrize(
    ("silent_s", "down"),
    [
        (UNREACHABLE_S - 1.0, set()),
        (UNREACHABLE_S + 1.0, {"t1"}),
        (LOST_AFTER_S - 1.0, {"t1"}),
        (LOST_AFTER_S + 1.0, {"t0", "t1"}),
    ],
)
def test_node_whose_ranks_may_run_without_contact_is_not_down(silent_s: float, down: set[str]) -> None:
    """Otherwise an outage of the API or the database would move jobs whose ranks go on."""
    log, agents = MemoryRunLog(), {("a", "t0"): agent_id(MACHINES[0])}
    job = a_job("a", state=JobState.RUNNING, on={"t0": (0,)})
    log.begin_run(build_begun_run(job, (("t0", 0),), agents, SEEN_S), epoch=1)
    log.record_reports(AgentReport("a", "t0", agents["a", "t0"], SEEN_S, 1, (RankReport(0, None, None),)))
    executor = AgentExecutor(
        RunLedger(log, epoch=lambda: 1), Directory(), now=lambda: SEEN_S + silent_s, disconnect_s=DISCONNECT_S
    )
    executor.converge(a_snapshot(a_fleet(training=2, inference=0), [job]))
    observed = executor.observe()
    assert {name for name, facts in observed.nodes.items() if not facts.up} == down
