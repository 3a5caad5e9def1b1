"""One small regime in the simulator: the bounds of the benchmark pages, and hidden true speeds and durations."""

from __future__ import annotations

from collections import defaultdict

import pytest

from scheduler.documents.trace_files import JobRow
from scheduler.domain.job_state import JobState
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.ground_truth import NOTHING_HIDDEN, GroundTruth
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.simulate import SimulationOptions, build_scenario, simulate
from scheduler.simulator.throughput_curves import CurveCache
from tests.simulation.synthetic import small_cluster, synthetic_demand, synthetic_jobs

JOBS = synthetic_jobs(3, 200, gap_s=600.0, mean_s=4_000.0)
CLUSTER = small_cluster(training=3, inference=5)
DEMAND = synthetic_demand(3, 2, peak_gpus=38)
LYRA_WAITING_GAIN, LYRA_JCT_GAIN = 1.53, 1.48
"""Published for Lyra on its own trace, EuroSys'23."""


def reports(*policies: str, truth: GroundTruth = NOTHING_HIDDEN) -> tuple[PolicyReport, ...]:
    return simulate(JOBS, DEMAND, CLUSTER, policies, seed=1, options=SimulationOptions(truth=truth)).policies


def test_ebbtide_gains_at_least_what_lyra_published() -> None:
    fifo, lyra, ebbtide = reports("fifo", "lyra", "ebbtide")
    assert fifo.queueing_s.mean > 1_000.0, "the trace must queue jobs for a meaningful comparison"
    assert fifo.queueing_s.mean > LYRA_WAITING_GAIN * ebbtide.queueing_s.mean
    assert fifo.jct_s.mean > LYRA_JCT_GAIN * ebbtide.jct_s.mean
    assert ebbtide.jct_s.mean < lyra.jct_s.mean
    assert ebbtide.resizes < lyra.resizes
    assert ebbtide.preemptions <= lyra.preemptions
    assert ebbtide.recalls > ebbtide.recalls_late == 0
    assert ebbtide.lost_ratio <= 0.004


def test_ebbtide_gains_with_unknown_speeds_and_durations() -> None:
    fifo, ebbtide = reports("fifo", "ebbtide", truth=GroundTruth(error=0.15, duration=0.5))
    assert fifo.completed == ebbtide.completed == len(JOBS)
    assert fifo.queueing_s.mean > LYRA_WAITING_GAIN * ebbtide.queueing_s.mean
    assert fifo.jct_s.mean > ebbtide.jct_s.mean > ebbtide.jct_bound_s
    assert ebbtide.recalls_late == 0


def test_recalls_stay_in_time_when_storage_is_too_slow_to_save() -> None:
    fast, slow = (
        simulate(
            JOBS[:60], DEMAND, CLUSTER.model_copy(update={"storage_bytes_per_s": rate}), "ebbtide", seed=1
        ).policies[0]
        for rate in (3.125e9, 2e7)
    )
    assert (fast.incomplete_saves, fast.recalls_late, slow.recalls_late) == (0, 0, 0)
    assert slow.incomplete_saves > 0
    assert slow.lost_gpu_hours > fast.lost_gpu_hours
    assert slow.jct_s.mean > fast.jct_s.mean


class Corrections:
    """Records each running job's curve correction over time."""

    def __init__(self) -> None:
        self.by_job: defaultdict[str, list[float]] = defaultdict(list)

    def on_tick(self, tick: TickRecord) -> None:
        for job in tick.after.jobs.values():
            if job.state is JobState.RUNNING:
                self.by_job[job.id].append(job.progress.correction)

    def on_demand_change(self, change: DemandChange) -> None:
        """Not recorded."""


def test_hidden_speed_shows_in_measured_progress_only() -> None:
    truth = GroundTruth(error=0.3, seed=1)
    rows = [JobRow(2 + n, f"job-{n}", n * 10.0, 20_000.0, 4) for n in range(4)]
    policies, corrections = load_policy_set("fifo"), Corrections()
    world = build_scenario(
        rows, DEMAND, CLUSTER, policies, seed=1, curves=CurveCache(), options=SimulationOptions(truth=truth)
    )
    Simulation(world, policies, observers=[corrections]).run()
    for job_id, seen in corrections.by_job.items():
        assert seen[0] == pytest.approx(1.0), "a job follows its curve until its first measurement"
        assert seen[-1] == pytest.approx(truth.draw_step_time_factor(job_id, 4), rel=0.01)
