"""Deadlines for leaving in a fault campaign follow the clock of the controller's host, as with real executors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from scheduler.domain.job_state import Allocation
from scheduler.domain.observation import RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from scheduler.simulator.campaign.faulty_parts import FaultyExecutor, HostFaults, JumpingClock, LeaveDeadlines
from tests.builders import a_job, a_node

NODE = a_node("t0")
DELAYS = Delays(start_s=0.0, reconfiguration_s=30.0)
"""A save takes 10 s."""


@pytest.mark.parametrize("jump_s", [0.0, -500.0, 500.0])
@pytest.mark.parametrize(("grace_s", "phase"), [(60.0, RunPhase.LEFT), (5.0, RunPhase.LOST)])
def test_job_has_its_grace_period_whatever_the_clock_shows(jump_s: float, grace_s: float, phase: RunPhase) -> None:
    world = SimulatedExecutor([NODE], delays=DELAYS)
    clock = JumpingClock(world)
    executor = FaultyExecutor(world, clock, HostFaults(Counter()), lambda desired: True, LeaveDeadlines())
    job = a_job("a", on={"t0": (0,)}, steps=1_000_000)
    executor.converge(Snapshot(generation=1, nodes={"t0": NODE}, jobs={"a": job}))
    world.advance_to(1000.0)
    clock.jump(jump_s)
    world.advance_to(20_000.0)
    assert clock.now_s() == 20_000.0 + jump_s
    leaving = Allocation(generation=2, releasing=job.allocation.target, leave_by_s=clock.now_s() + grace_s)
    executor.converge(Snapshot(generation=2, nodes={"t0": NODE}, jobs={"a": replace(job, allocation=leaving)}))
    world.advance_to(20_010.0)
    (run,) = executor.observe().runs
    assert run.phase is phase
    assert run.checkpoint_steps == (20_000.0 if phase is RunPhase.LEFT else 19_800.0)


def test_two_leaders_whose_clocks_differ_do_not_change_a_deadline_in_turn() -> None:
    world, deadlines = SimulatedExecutor([NODE], delays=DELAYS), LeaveDeadlines()
    clocks = JumpingClock(world), JumpingClock(world)
    on_time, late = (FaultyExecutor(world, clock, HostFaults(Counter()), lambda _: True, deadlines) for clock in clocks)
    job = a_job("a", on={"t0": (0,)}, steps=1_000_000)
    on_time.converge(Snapshot(generation=1, nodes={"t0": NODE}, jobs={"a": job}))
    world.advance_to(1000.0)
    clocks[1].jump(-500.0)
    leaving = Allocation(generation=2, releasing=job.allocation.target, leave_by_s=1005.0)
    desired = Snapshot(generation=2, nodes={"t0": NODE}, jobs={"a": replace(job, allocation=leaving)})
    for executor in (on_time, late, on_time, late):
        executor.converge(desired)
        executor.observe()
    assert world.next_event_s() == 1005.0
