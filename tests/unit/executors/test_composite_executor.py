"""CompositeExecutor: every part sees its own nodes and jobs, and the observation covers all of them."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.fleet import Node
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import Allocation
from scheduler.domain.observation import Observation, RunPhase
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.composite_executor import CompositeExecutor, ExecutorPart
from scheduler.executors.executor import RecordingExecutor
from scheduler.executors.paced_simulation import PacedSimulation
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from tests.builders import GPU, a_fleet, a_job, a_loan, a_snapshot
from tests.properties.worlds import a_world

REAL: Gpus = {"t0": (0, 1)}
SIMULATED: Gpus = {"t1": (0, 1)}


def is_simulated(node: Node) -> bool:
    return int(node.name[1:]) % 2 == 1


class TwoWorlds:
    """A recorded world of even nodes and a simulated one of odd nodes, under one desired state."""

    def __init__(self) -> None:
        self.now_s = 0.0
        fleet = a_fleet(training=2, inference=2)
        self.snapshot = a_snapshot(fleet)
        odd = [node for node in fleet[1].values() if is_simulated(node)]
        delays = Delays(start_s=5.0, reconfiguration_s=6.0)
        self.real = RecordingExecutor()
        self.simulation = PacedSimulation(SimulatedExecutor(odd, delays=delays), now=lambda: self.now_s)
        self.parts = [
            ExecutorPart(self.real, lambda node: not is_simulated(node)),
            ExecutorPart(self.simulation, is_simulated),
        ]
        self.executor = CompositeExecutor(self.parts)

    def place(self, job_id: str, target: Gpus, *, releasing: Gpus | None = None) -> Job:
        old = self.snapshot.jobs.get(job_id) or a_job(job_id, 1, 8, steps=1_000_000)
        allocation = Allocation(
            generation=old.allocation.generation + 1,
            target=target,
            releasing=old.allocation.target if releasing is None else releasing,
            plan=build_data_parallel_plan(GPU, 2) if target else None,
        )
        job = replace(old, allocation=allocation)
        self.put(replace(self.snapshot, jobs={**self.snapshot.jobs, job_id: job}))
        return job

    def put(self, snapshot: Snapshot) -> None:
        self.snapshot = replace(snapshot, generation=self.snapshot.generation + 1, now_s=self.now_s)
        self.executor.converge(self.snapshot)

    def observe(self, *, at_s: float) -> Observation:
        """Observe, and converge again as a tick without decisions does."""
        self.now_s = at_s
        observation = self.executor.observe()
        self.put(self.snapshot)
        return observation


def list_phases(observation: Observation) -> dict[tuple[str, int], RunPhase]:
    return {(run.job_id, run.generation): run.phase for run in observation.runs}


def test_both_worlds_are_observed() -> None:
    worlds = TwoWorlds()
    worlds.place("real", REAL)
    worlds.place("simulated", SIMULATED)
    observation = worlds.observe(at_s=10.0)
    assert list_phases(observation) == {("real", 1): RunPhase.RUNNING, ("simulated", 1): RunPhase.RUNNING}
    assert observation.nodes.keys() == worlds.snapshot.nodes.keys()
    assert observation.converged_generation == 2


def test_each_part_sees_its_own_nodes_jobs_and_loans() -> None:
    worlds = TwoWorlds()
    worlds.place("real", REAL)
    worlds.place("simulated", SIMULATED)
    worlds.place("pending", {})
    worlds.put(replace(worlds.snapshot, loans={"i0": a_loan("i0"), "i1": a_loan("i1")}))
    seen = worlds.real.converged_snapshots[-1]
    assert seen.nodes.keys() == {"t0", "i0"}
    assert seen.jobs.keys() == {"real", "pending"}
    assert seen.loans.keys() == {"i0"}


def test_a_job_that_moves_starts_once_the_other_part_has_let_it_go() -> None:
    worlds = TwoWorlds()
    worlds.place("job", SIMULATED)
    worlds.observe(at_s=10.0)
    worlds.place("job", REAL)
    assert not worlds.real.converged_snapshots[-1].jobs["job"].allocation.target
    assert list_phases(worlds.observe(at_s=10.5)) == {("job", 1): RunPhase.LEAVING}
    left = worlds.observe(at_s=60.0)
    assert list_phases(left) == {("job", 1): RunPhase.LEFT}
    moved = replace(worlds.snapshot.jobs["job"].allocation, releasing={})
    worlds.put(replace(worlds.snapshot, jobs={"job": replace(worlds.snapshot.jobs["job"], allocation=moved)}))
    assert list_phases(worlds.observe(at_s=61.0))["job", 2] is RunPhase.RUNNING
    assert worlds.real.converged_snapshots[-1].jobs["job"].allocation.target == REAL


def test_a_generation_on_nodes_of_both_parts_fails_and_starts_nowhere() -> None:
    worlds = TwoWorlds()
    worlds.place("job", {**REAL, **SIMULATED})
    observation = worlds.observe(at_s=100.0)
    assert list_phases(observation) == {("job", 1): RunPhase.FAILED}
    assert all(not each.jobs["job"].allocation.target for each in worlds.real.converged_snapshots)


def test_a_state_that_a_part_has_not_reached_is_not_confirmed() -> None:
    worlds = TwoWorlds()
    worlds.place("job", REAL)
    behind = RecordingExecutor()
    executor = CompositeExecutor([*worlds.parts, ExecutorPart(behind, lambda node: False)])
    executor.converge(worlds.snapshot)
    behind.converge(replace(worlds.snapshot, generation=0))
    assert executor.observe().converged_generation == 0


def test_simulated_inference_follows_the_reported_demand() -> None:
    worlds = TwoWorlds()
    world = a_world(3).snapshot
    reading = replace(world.demand["inference"], gpus=3.0)
    worlds.put(replace(worlds.snapshot, demand={"inference": reading}))
    assert worlds.observe(at_s=1.0).nodes["i1"].inference_gpus == 3


def test_a_change_of_the_simulation_is_pending_until_it_is_observed() -> None:
    worlds = TwoWorlds()
    worlds.place("job", SIMULATED)
    worlds.observe(at_s=1.0)
    assert not worlds.simulation.has_pending_changes()
    worlds.now_s = 5.0
    assert worlds.simulation.has_pending_changes()
    worlds.observe(at_s=5.0)
    assert not worlds.simulation.has_pending_changes()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_no_job_is_targeted_in_two_parts_and_no_run_or_node_is_lost(seed: int) -> None:
    desired = a_world(seed).snapshot
    parts = [
        ExecutorPart(RecordingExecutor(), lambda node: not is_simulated(node)),
        ExecutorPart(RecordingExecutor(), is_simulated),
    ]
    executor = CompositeExecutor(parts)
    executor.converge(desired)
    observation = executor.observe()
    shares = [part.select(desired) for part in parts]
    for job in desired.jobs.values():
        targets = [share.jobs[job.id].allocation.target for share in shares if job.id in share.jobs]
        placed = [target for target in targets if target]
        sides = {is_simulated(desired.nodes[name]) for name in job.allocation.held}
        assert placed == ([job.allocation.target] if len(sides) == 1 and job.allocation.target else [])
        assert all(job.id in share.jobs for share in shares) or sides, "each part keeps a job without GPUs"
    assert {name for share in shares for name in share.nodes} == desired.nodes.keys() == observation.nodes.keys()
    assert math.isclose(observation.at_s, desired.now_s)
    wanted = {job_id for share in shares for job_id, job in share.jobs.items() if job.allocation.target}
    spanning = {run.job_id for run in observation.runs if run.phase is RunPhase.FAILED}
    assert {run.job_id for run in observation.runs} == wanted | spanning
    assert not wanted & spanning


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_unchanged_jobs_reach_a_part_as_the_same_objects(seed: int) -> None:
    desired = a_world(seed).snapshot
    part = ExecutorPart(RecordingExecutor(), is_simulated, observed_jobs=frozenset(desired.jobs))
    first, second = part.select(desired), part.select(replace(desired, generation=8))
    assert all(second.jobs[job_id] is job for job_id, job in first.jobs.items())
