"""The executor of machines with node agents: which nodes are down."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scheduler.domain.job_state import JobState
from scheduler.domain.machine import GpuDevice, Machine, MachineInventory
from scheduler.domain.observation import AgentReport, RankReport, RunPhase
from scheduler.domain.program import Program
from scheduler.executors.agent_executor import CONTACT_MARGIN_S, UNREACHABLE_S, AgentExecutor, agent_id
from scheduler.executors.reported_runs import build_begun_run
from scheduler.executors.run_ledger import RunLedger
from tests.builders import a_fleet, a_job, a_node, a_snapshot
from tests.memory_run_log import MemoryRunLog

SEEN_S, DISCONNECT_S = 1000.0, 120.0
LOST_AFTER_S = DISCONNECT_S + CONTACT_MARGIN_S
MACHINES = tuple(
    Machine(name, (name,), "training", "cpu", "127.0.0.1", "0", 0.0, seen_at_s=SEEN_S, digest=f"{name}-digest")
    for name in ("t0", "t1")
)


@dataclass(frozen=True, slots=True)
class Directory:
    machines: tuple[Machine, ...] = MACHINES

    def list_machines(self) -> tuple[Machine, ...]:
        return self.machines


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


def test_setup_command_of_a_generation_that_has_not_begun_is_told() -> None:
    log, agents = MemoryRunLog(), {("a", "t0"): agent_id(MACHINES[0])}
    job = a_job("a", state=JobState.STARTING, on={"t0": (0,)})
    job = replace(job, spec=replace(job.spec, program=Program(archive=f"sha256:{0:064}", setup=("make",))))
    generation = job.allocation.generation
    executor = AgentExecutor(
        RunLedger(log, epoch=lambda: 1), Directory(), now=lambda: SEEN_S, disconnect_s=DISCONNECT_S
    )
    executor.converge(a_snapshot(a_fleet(training=2, inference=0), [job]))
    assert executor.observe().runs == ()
    log.record_reports(AgentReport("a", "t0", agents["a", "t0"], SEEN_S, setting_up=generation))
    [run] = executor.observe().runs
    assert (run.generation, run.phase, run.gpus) == (generation, RunPhase.STARTING, {})
    assert "t0" in run.reason
    log.record_reports(AgentReport("a", "t0", agents["a", "t0"], SEEN_S, prepared=generation))
    assert executor.observe().runs == ()


def test_declared_node_is_down_where_the_machine_of_the_service_lacks_its_devices() -> None:
    """It was declared before the machine joined, or the machine has lost a GPU."""
    inventory = MachineInventory(gpus=(GpuDevice(0, "NVIDIA L4", "GPU-0", 24 * 10**9),))
    own = Machine("vm", (), "", "", "127.0.0.1", "0", 0.0, seen_at_s=SEEN_S, digest="vm", is_service=True)
    executor = AgentExecutor(
        RunLedger(MemoryRunLog(), epoch=lambda: 1),
        Directory((replace(own, inventory=inventory),)),
        now=lambda: SEEN_S,
        disconnect_s=DISCONNECT_S,
    )
    pools, _ = a_fleet(training=0, inference=0)
    nodes = [a_node("slots", gpus=8, gpu="cpu"), a_node("fits", gpus=1, gpu="l4"), a_node("lacks", gpus=2, gpu="l4")]
    executor.converge(a_snapshot((pools, {node.name: node for node in nodes}), []))
    assert {name for name, facts in executor.observe().nodes.items() if not facts.up} == {"lacks"}
