"""A simulated job that runs out of memory gets a plan of the real solver with corrected memory."""

from __future__ import annotations

import math

from scheduler.documents.trace_files import DemandRow, JobRow
from scheduler.domain.decisions import StartJob
from scheduler.domain.job_state import JobState
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.engine import Simulation
from scheduler.simulator.fault_injection import NoFaults
from scheduler.simulator.simulate import build_scenario
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.store.protocol import Page
from tests.simulation.synthetic import small_cluster

FIFO = load_policy_set("fifo")
ROW = JobRow(2, "train", 0.0, 6000.0, 4, min_gpus=4, max_gpus=4, model="llama-2-7b", global_batch=64)
BUSY = DemandRow(2, 0.0, "inference", 8.0, is_load=False)


class OneOutOfMemoryFailure(NoFaults):
    """The job runs out of memory once."""

    def __init__(self) -> None:
        self._at_s = 3000.0

    def next_event_s(self) -> float:
        return self._at_s

    def inject_due(self, now_s: float, world: SimulatedExecutor) -> None:
        if now_s >= self._at_s:
            assert world.run_out_of_memory("train", peak_bytes=0)
            self._at_s = math.inf


def test_job_continues_with_a_plan_that_needs_less_memory() -> None:
    curves = CurveCache()
    world = build_scenario([ROW], [BUSY], small_cluster(training=1, inference=1), FIFO, seed=0, curves=curves)
    simulation = Simulation(world, FIFO, faults=OneOutOfMemoryFailure(), curves=curves)
    simulation.run()
    (job,) = simulation.memory_store.list_ended_jobs(limit=2)
    assert (job.state, len(job.memory.deaths)) == (JobState.SUCCEEDED, 1)
    decisions = [stored.decision for stored in simulation.memory_store.list_decisions(Page(limit=100))]
    first, second = (decision.plan.peak_bytes_per_gpu for decision in decisions if isinstance(decision, StartJob))
    memory_bytes = world.nodes[0].gpu_memory_bytes
    assert second * job.memory.factor <= memory_bytes < first * job.memory.factor
