"""`python -m tests.monitoring.simulated_day PATH`: a day of a fleet, played by the simulator and scraped all along.

Demand like a tide, lending and recalls, queues that borrow and get theirs back, crashes and lost nodes: what a service
would show at /metrics, with the times of that day.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TextIO

import httpx

from api.app import create_app
from scheduler.domain.fleet import LendingPolicy
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.job import CheckpointSpec, JobSpec
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.tick_report import WantedShape
from scheduler.executors.protocol import Executor
from scheduler.executors.simulated import SimulatedExecutor
from scheduler.executors.simulated_delays import Delays
from scheduler.policies.policy_set import policy_set
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.process_pool import ProcessPool
from scheduler.settings import Settings
from scheduler.simulator.engine import Scenario, Simulation
from scheduler.simulator.injector import FaultKind, FaultRates, SeededFaults
from scheduler.simulator.ticked import Ticked
from scheduler.simulator.traces import DemandChange, DemandTrace
from scheduler.simulator.workloads import Submission
from scheduler.store.protocol import Store
from scheduler.telemetry.metrics import record_solve
from scheduler.telemetry.tick_recorder import TickRecorder
from tests.api.conftest import AppTransport
from tests.builders import GPU, a_fleet, a_job, a_snapshot
from tests.memory_run_log import MemoryRunLog

START_S = 20_370 * 86_400.0
END_S = START_S + 86_400.0
SCRAPE_S = 120.0
_CRASHY = "crashy"
_FAULTS: Mapping[FaultKind, float] = {FaultKind.NODE_LOSS: 20_000.0, FaultKind.WORKER_CRASH: 6_000.0}


def play_day(path: Path) -> None:
    """Write the samples of each scrape to `path`, in the text format that `promtool tsdb create-blocks-from` reads."""
    with path.open("w", encoding="utf-8") as file:
        day = _Day(file)
        day.play()
        file.write("# EOF\n")


class _Day:
    """Watches the simulation, and stands between it and its faults, because what a scrape sees is what the tick before
    it has left."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._recorder = TickRecorder()
        self._scrape_at_s = START_S
        world, policies = _scenario(), policy_set("ebbtide")
        rates = FaultRates(END_S - 7200.0, _FAULTS)
        self._faults = SeededFaults(1, tuple(node.name for node in world.nodes), rates, start_s=START_S)
        self._simulation = Simulation(world, policies, watchers=(self,), faults=self)
        app = create_app(
            self._simulation.memory,
            Settings(auth="off", allowed_hosts="service"),
            clock=self._simulation.clock,
            policies=policies,
            lease=self._simulation.memory.lease,
            token_secret=b"a secret that only tests know....",
            run_log=MemoryRunLog(),
        )
        self._http = httpx.Client(transport=AppTransport(app), base_url="http://service")

    def play(self) -> None:
        with self._http:
            self._simulation.run()

    def ticked(self, tick: Ticked) -> None:
        self._recorder.record(tick.report)

    def demand_changed(self, change: DemandChange) -> None:
        """The next tick tells of it."""

    def around_store(self, store: Store) -> Store:
        return self._faults.around_store(store)

    def around_executor(self, executor: Executor) -> Executor:
        return self._faults.around_executor(executor)

    def next_event_s(self) -> float:
        return min(self._faults.next_event_s(), self._scrape_at_s)

    def happen(self, now_s: float, world: SimulatedExecutor) -> None:
        self._faults.happen(now_s, world)
        if now_s >= self._scrape_at_s:
            if START_S + 36_000.0 <= now_s < START_S + 39_000.0:
                world.crash(_CRASHY)
            self._scrape(now_s)
            if now_s == START_S + 21_600.0:
                _solve_some()
            self._scrape_at_s = now_s + SCRAPE_S if now_s < END_S else math.inf

    def _scrape(self, now_s: float) -> None:
        answer = self._http.get("/metrics")
        assert answer.status_code == 200, answer.text
        for line in answer.text.splitlines():
            if not line.startswith("#") and "_created" not in line:
                self._file.write(f"{line} {now_s:.3f}\n")


def _scenario() -> Scenario:
    lending = LendingPolicy(quantile=0.9, return_deadline_s=300.0, cold_start_s=300.0)
    pools, nodes = a_fleet(training=3, inference=5, lending=lending)
    queues = (JobQueue("lab", guaranteed_gpus=16), JobQueue("web", guaranteed_gpus=8))
    return Scenario(
        tuple(pools.values()),
        tuple(nodes.values()),
        tuple(sorted(_submissions(), key=lambda submission: submission.at_s)),
        (_demand(),),
        Delays(),
        seed=1,
        queues=queues,
    )


def _submissions() -> Iterator[Submission]:
    random, at_s = Random("jobs of a day"), START_S
    yield _submission(_CRASHY, START_S + 30_000.0, JobSpec(_CRASHY, 1, 1, steps=40_000, priority=9, retries=99))
    for number in range(110):
        least = random.choice((1, 2, 4, 8))
        steps = round(least * 5000.0 * random.lognormvariate(0.0, 0.8))
        queue = random.choice(("lab", "lab", "web", "somebodys"))
        yield _submission(f"job-{number}", at_s, JobSpec(f"job-{number}", least, 4 * least, queue, steps=steps))
        at_s += random.expovariate(1.0 / 750.0)
    yield _submission("last", END_S - 600.0, JobSpec("last", 1, 1, steps=500))


def _submission(job_id: str, at_s: float, spec: JobSpec) -> Submission:
    return Submission(at_s, job_id, replace(spec, checkpoint=CheckpointSpec(interval_s=600.0)), spec.max_gpus, 1.0)


def _demand() -> DemandTrace:
    """From 4 to 36 of 40 GPUs, least in the morning of that day, with a surge that nobody could foresee."""
    random, times_s = Random("demand of a day"), [START_S + 300.0 * number for number in range(288)]
    waves = [20.0 - 16.0 * math.sin(2.0 * math.pi * (at_s - START_S) / 86_400.0) for at_s in times_s]
    surges = [12.0 if 20_000.0 <= at_s - START_S < 24_000.0 else 0.0 for at_s in times_s]
    gpus = [max(0.0, wave + surge + random.gauss(0.0, 0.5)) for wave, surge in zip(waves, surges, strict=True)]
    return DemandTrace("inference", tuple(times_s), tuple(gpus))


def _solve_some() -> None:
    """Two points of a curve by the service's own curve builder; in a simulation the solver runs in place, uncounted."""
    job = a_job("a", 1, 8, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job])
    pool = ProcessPool(1)
    curves = CurveBuilder(pool, most_in_flight=4, on_solved=record_solve)
    curves.want(snapshot, [WantedShape(job.spec.curve_key, GpuShape.packed(GPU, gpus, 8)) for gpus in (4, 8)])
    wait([pool.submit(int)])  # one process takes them in turn
    assert len(curves.finished(START_S)) == 2
    curves.close()


if __name__ == "__main__":
    play_day(Path(sys.argv[1]))
