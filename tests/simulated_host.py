"""A real controller on a database, whose machines are simulated."""

from __future__ import annotations

from collections import Counter

from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.campaign.checks import CaseChecks
from scheduler.simulator.campaign.faulty_parts import HostFaults, LeaveDeadlines
from scheduler.simulator.campaign.host import Host
from scheduler.store.protocol import Store


def start_host(store: Store, world: SimulatedExecutor, checks: CaseChecks) -> Host:
    """Return a host without faults. Its ticks are checked."""
    return Host(
        "a",
        store,
        world,
        load_policy_set("ebbtide"),
        HostFaults(Counter()),
        fail_transaction=lambda: False,
        put_into_effect=lambda desired: True,
        deadlines=LeaveDeadlines(),
        on_report=checks.check_report,
        stage_hook=lambda host, point: None,
    )
