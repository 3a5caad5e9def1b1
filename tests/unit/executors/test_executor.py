"""RecordingExecutor."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.fleet import LoanState
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.executor import RecordingExecutor
from tests.builders import a_fleet, a_job, a_loan, a_snapshot


def test_observation_matches_the_initial_state() -> None:
    world = replace(
        a_snapshot(a_fleet(training=1, inference=1), [a_job("a", state=JobState.STARTING, on={"t0": (0,)})]),
        generation=7,
        now_s=5.0,
    )
    seen = RecordingExecutor(world).observe()
    assert (seen.at_s, seen.converged_generation) == (5.0, 7)
    assert [(run.job_id, run.phase, run.generation, run.gpus) for run in seen.runs] == [
        ("a", RunPhase.RUNNING, 1, {"t0": (0,)})
    ]
    assert all(facts.up for facts in seen.nodes.values())


def test_all_states_are_recorded_and_the_last_is_observed() -> None:
    executor = RecordingExecutor()
    pools, nodes = a_fleet(training=1, inference=1)
    busy = {**nodes, "i0": replace(nodes["i0"], inference_gpus=3)}
    offered = a_snapshot((pools, busy), (), [a_loan("i0", LoanState.OFFERED)])
    states = [Snapshot(generation=1, nodes=busy, pools=pools), replace(offered, generation=2)]
    for state in states:
        executor.converge(state)
    assert executor.converged_snapshots == states
    assert executor.observe().converged_generation == 2
    assert executor.observe().nodes["i0"].inference_gpus == 0, "the offered node is drained"
