"""A controller process whose workers are made up: `python -m tests.controller_process RECORD [POINT]`.

The real loop on the database of EBBTIDE_DATABASE_URL. Jobs whose id begins with BRIEF end a second after they started,
all others run on. RECORD gets a line a tick: when, its seconds, its generation if it committed. With a POINT, it stops
itself there (SIGSTOP) at the first commit that takes in commands: a name of the tick's hook, or `inside-commit`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.domain.tick_report import TickReport
from scheduler.executors.executor import RecordingExecutor
from scheduler.forecast.forecaster import PoolForecaster
from scheduler.runtime.clock import RealClock
from scheduler.runtime.controller import Controller, ControllerConfig
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.demand_forecasts import DemandForecaster
from scheduler.runtime.process_pool import ProcessPool
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.store.sql_store import SqlStore

BRIEF, BRIEF_S = "brief", 1.0
INSIDE_COMMIT = "inside-commit"


class MadeUpWorkers(RecordingExecutor):
    def __init__(self) -> None:
        super().__init__()
        self._begun_s: dict[str, float] = {}

    def observe(self) -> Observation:
        seen, now_s = super().observe(), time.time()
        self.converged_snapshots.clear()
        self._begun_s = {run.job_id: self._begun_s.get(run.job_id, now_s) for run in seen.runs}
        return replace(seen, runs=tuple(self._as_it_is(run, now_s) for run in seen.runs))

    def _as_it_is(self, run: Run, now_s: float) -> Run:
        if not run.job_id.startswith(BRIEF) or now_s - self._begun_s[run.job_id] < BRIEF_S:
            return run
        return replace(run, phase=RunPhase.SUCCEEDED, gpus={}, steps=1.0)


class Stopper:
    """Stops this process once, where it takes in commands."""

    def __init__(self, point: str, takes_in: Callable[[], bool]) -> None:
        self._point = point
        self._takes_in = takes_in
        self._took_in = False

    def at(self, point: str) -> None:
        if point != "after-commit":  # then the inbox is empty again
            self._took_in = self._takes_in()
        if point == self._point and self._took_in:
            self._point = ""
            os.kill(os.getpid(), signal.SIGSTOP)

    def inside(self, _connection: object, _cursor: object, statement: str, *_more: Any) -> None:
        if statement.startswith("UPDATE inbox"):
            self.at(INSIDE_COMMIT)


def main(record: Path, point: str = "") -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings, clock = Settings(), RealClock()
    store = SqlStore(settings.database_url)
    stopper = Stopper(point, lambda: bool(store.load().inbox))
    if point == INSIDE_COMMIT:
        stopper = Stopper(point, lambda: True)
        event.listen(Engine, "before_cursor_execute", stopper.inside)
    with record.open("a", buffering=1) as lines:

        def write(report: TickReport) -> None:
            generation = report.generation if report.committed else 0
            figures = [clock.now_s(), sum(report.stage_s.values()), generation, dict(report.stage_s)]
            lines.write(json.dumps(figures) + "\n")

        Controller(
            holder=f"{record.name}-{os.getpid()}-{clock.now_s()}",
            store=store,
            executor=MadeUpWorkers(),
            clock=clock,
            policies=load_policy_set(settings.policy),
            curves=CurveBuilder(ProcessPool(1), in_flight_max=4),
            demand=DemandForecaster(store, PoolForecaster, history_s=1.0, fits=ThreadPoolExecutor(1)),
            on_report=write,
            config=ControllerConfig(lease_s=settings.lease_s),
            stage_hook=stopper.at,
        ).run(stop)
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
