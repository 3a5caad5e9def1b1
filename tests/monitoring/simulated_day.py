"""`python -m tests.monitoring.simulated_day PATH`: simulates a day of a cluster and scrapes its metrics.

The day has periodic demand, loans and recalls, borrowing queues, crashes and lost nodes, hours in which saves hang, a
faulty policy, webhooks and an event stream. All parts but the executor are those of the service.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TextIO

import httpx

from api.app import create_app
from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.executors.executor import Executor
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.simulator.demand import DemandChange, DemandTrace
from scheduler.simulator.engine import Scenario, Simulation, TickRecord
from scheduler.simulator.fault_injection import FaultKind, FaultRates, SeededFaultInjector
from scheduler.simulator.ground_truth import GroundTruth
from scheduler.simulator.workloads import Submission
from scheduler.store.protocol import Store
from scheduler.telemetry.tick_metrics import TickRecorder
from tests.api.conftest import AppTransport
from tests.builders import a_fleet
from tests.memory_run_log import MemoryRunLog
from tests.monitoring.reporting_executor import ReportingExecutor, make_faulty_placement
from tests.monitoring.service_at_work import deliver_and_delete, open_stream, record_solves

START_S = 20_370 * 86_400.0
END_S = START_S + 86_400.0
SCRAPE_S = 120.0
CLUSTER = "day"
_CRASHING_JOB, _FAILING_JOB, _CRASHING_S = "crashy", "fails", (36_000.0, 39_000.0)
_FAULTY_POLICY_S, _HANGING_S, _STREAMING_S = (27_000.0, 28_800.0), (12_000.0, 23_000.0), (50_400.0, 54_000.0)
_SERVICE_WORK_S = 21_600.0
_FAULTS: Mapping[FaultKind, float] = {FaultKind.NODE_LOSS: 20_000.0, FaultKind.WORKER_CRASH: 6_000.0}


def write_day(path: Path) -> None:
    """Write the samples of each scrape to `path`, in the text format that `promtool tsdb create-blocks-from` reads."""
    with path.open("w", encoding="utf-8") as file:
        day = _SimulatedDay(file)
        day.run()
        file.write("# EOF\n")


class _SimulatedDay:
    """Observer and fault injector of the simulation. It scrapes as a fault, between two ticks."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._recorder = TickRecorder()
        self._scrape_at_s = START_S
        scenario = _build_scenario()
        policies = replace(
            load_policy_set("ebbtide"), place=make_faulty_placement(lambda: self._is_within(_FAULTY_POLICY_S))
        )
        rates = FaultRates(END_S - 7200.0, _FAULTS)
        self._faults = SeededFaultInjector(1, tuple(node.name for node in scenario.nodes), rates, start_s=START_S)
        self._simulation = Simulation(scenario, policies, observers=(self,), faults=self)
        app = create_app(
            self._simulation.memory_store,
            Settings(auth="off", allowed_hosts="service", metrics_by_job=True, cluster=CLUSTER),
            clock=self._simulation.clock,
            policies=policies,
            lease=self._simulation.memory_store.get_lease,
            token_secret=b"a secret that only tests know....",
            run_log=MemoryRunLog(),
        )
        self._app, self._stream = app, ExitStack()
        self._http = httpx.Client(transport=AppTransport(app), base_url="http://service")

    def run(self) -> None:
        with self._http, self._stream:
            self._simulation.run()

    def on_tick(self, tick: TickRecord) -> None:
        self._recorder.record(tick.report)

    def on_demand_change(self, change: DemandChange) -> None:
        """Do nothing: the next tick reports it."""

    def wrap_store(self, store: Store) -> Store:
        return self._faults.wrap_store(store)

    def wrap_executor(self, executor: Executor) -> Executor:
        return ReportingExecutor(self._faults.wrap_executor(executor), hangs=lambda: self._is_within(_HANGING_S))

    def next_event_s(self) -> float:
        return min(self._faults.next_event_s(), self._scrape_at_s)

    def inject_due(self, now_s: float, world: SimulatedExecutor) -> None:
        self._faults.inject_due(now_s, world)
        if now_s >= self._scrape_at_s:
            if self._is_within(_CRASHING_S):
                world.crash_job(_CRASHING_JOB)
                world.crash_job(_FAILING_JOB)
            for job_id in world.list_running_jobs() if self._is_within(_HANGING_S) else ():
                world.delay_save(job_id, 1800.0)
            self._scrape(now_s)
            if now_s == START_S + _STREAMING_S[0]:
                self._stream.enter_context(open_stream(self._app))
            if now_s == START_S + _STREAMING_S[1]:
                self._stream.close()
            if now_s == START_S + _SERVICE_WORK_S:
                record_solves(now_s)
                with TemporaryDirectory() as folder:
                    deliver_and_delete(Path(folder), now_s)
            self._scrape_at_s = now_s + SCRAPE_S if now_s < END_S else math.inf

    def _is_within(self, span_s: tuple[float, float]) -> bool:
        return span_s[0] <= self._simulation.clock.now_s() - START_S < span_s[1]

    def _scrape(self, now_s: float) -> None:
        answer = self._http.get("/metrics")
        assert answer.status_code == 200, answer.text
        for line in answer.text.splitlines():
            if not line.startswith("#") and "_created" not in line:
                self._file.write(f"{line} {now_s:.3f}\n")


def _build_scenario() -> Scenario:
    usual = tuple(_wave_gpus(3600.0 * hour) + 4.0 for hour in range(24))
    lending = LendingPolicy(shortage_target=0.01, return_deadline_s=300.0, cold_start_s=300.0, demand_profile=usual)
    pools, nodes = a_fleet(training=3, inference=5, lending=lending)
    queues = (JobQueue("lab", guaranteed_gpus=16), JobQueue("web", guaranteed_gpus=8))
    return Scenario(
        tuple(pools.values()),
        tuple(nodes.values()),
        tuple(sorted(_generate_submissions(), key=lambda submission: submission.at_s)),
        (_build_demand(),),
        Delays(),
        seed=1,
        truth=GroundTruth(error=0.1, seed=1),
        queues=queues,
    )


def _generate_submissions() -> Iterator[Submission]:
    random, at_s = Random("jobs of a day"), START_S
    yield _build_submission(
        _CRASHING_JOB, START_S + 30_000.0, JobSpec(_CRASHING_JOB, 1, 1, steps=40_000, priority=9, retries=99)
    )
    yield _build_submission(
        _FAILING_JOB, START_S + 30_000.0, JobSpec(_FAILING_JOB, 1, 1, "lab", steps=40_000, priority=9, retries=1)
    )
    for number in range(110):
        gpus_min = random.choice((1, 2, 4, 8))
        steps = round(gpus_min * 5000.0 * random.lognormvariate(0.0, 0.8))
        queue = random.choice(("lab", "lab", "web", "undeclared"))
        yield _build_submission(
            f"job-{number}",
            at_s,
            JobSpec(f"job-{number}", gpus_min, 4 * gpus_min, queue, steps=steps, on_resize=OnResize.CHECKPOINT),
        )
        at_s += random.expovariate(1.0 / 750.0)
    yield _build_submission("last", END_S - 600.0, JobSpec("last", 1, 1, steps=500))


def _build_submission(job_id: str, at_s: float, spec: JobSpec) -> Submission:
    return Submission(at_s, job_id, replace(spec, checkpoint=CheckpointSpec(interval_s=600.0)), spec.max_gpus, 1.0)


def _build_demand() -> DemandTrace:
    """Return demand from 4 to 36 of 40 GPUs, lowest in the morning, with an unforeseeable surge."""
    random, times_s = Random("demand of a day"), [START_S + 300.0 * number for number in range(288)]
    waves = [_wave_gpus(at_s - START_S) for at_s in times_s]
    surges = [22.0 if 20_000.0 <= at_s - START_S < 24_000.0 else 0.0 for at_s in times_s]
    gpus = [max(0.0, wave + surge + random.gauss(0.0, 0.5)) for wave, surge in zip(waves, surges, strict=True)]
    return DemandTrace("inference", tuple(times_s), tuple(gpus))


def _wave_gpus(day_s: float) -> float:
    return 20.0 - 16.0 * math.sin(2.0 * math.pi * day_s / 86_400.0)


if __name__ == "__main__":
    write_day(Path(sys.argv[1]))
