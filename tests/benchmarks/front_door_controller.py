"""The controller of the front door's benchmark: `python -m tests.benchmarks.front_door_controller RECORD`.

The real loop on the database of EBBTIDE_DATABASE_URL; only its workers are made up. Brief jobs end a second after they
started, all others run on. A line of RECORD a tick: when, its seconds, the commands that it took in, how many events.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.executors.recording import RecordingExecutor
from scheduler.policies.policy_set import policy_set
from scheduler.runtime.clock import RealClock
from scheduler.runtime.controller import Controller
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.demand_watch import DemandWatch
from scheduler.runtime.process_pool import ProcessPool
from scheduler.settings import Settings
from scheduler.store.sql import SqlStore
from tests.benchmarks.front_door_site import BRIEF

BRIEF_S = 1.0


class BriefJobs(RecordingExecutor):
    """Jobs named BRIEF are over in no time."""

    def __init__(self) -> None:
        super().__init__()
        self._begun_s: dict[str, float] = {}

    def observe(self) -> Observation:
        seen, now_s = super().observe(), time.time()
        self.converged.clear()
        self._begun_s = {run.job_id: self._begun_s.get(run.job_id, now_s) for run in seen.runs}
        return replace(seen, runs=tuple(self._as_it_is(run, now_s) for run in seen.runs))

    def converge(self, desired: Snapshot) -> None:
        super().converge(desired)

    def _as_it_is(self, run: Run, now_s: float) -> Run:
        if not run.job_id.startswith(BRIEF) or now_s - self._begun_s[run.job_id] < BRIEF_S:
            return run
        return replace(run, phase=RunPhase.SUCCEEDED, gpus={}, steps=1.0)


def main(record: Path) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    store, clock = SqlStore(Settings().database_url), RealClock()
    with record.open("a", buffering=1) as lines:

        def write(report: TickReport) -> None:
            figures = [clock.now_s(), sum(report.stage_s.values()), len(report.events), dict(report.stage_s)]
            lines.write(json.dumps(figures) + "\n")

        controller = Controller(
            holder=f"bench-{clock.now_s()}",
            store=store,
            executor=BriefJobs(),
            clock=clock,
            policies=policy_set("ebbtide"),
            curves=CurveBuilder(ProcessPool(1), most_in_flight=4),
            demand=DemandWatch(store, lambda: None, memory_s=1.0),  # type: ignore[arg-type, return-value]  # no pool lends
            on_report=write,
        )
        controller.run(stop)
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
