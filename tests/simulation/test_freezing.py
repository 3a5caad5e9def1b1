"""A job that freezes its layers by PipeTransformer's schedule, with plans of the real solver."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

from scheduler.domain.commands import Command, CommandBody, ReportProgress, SubmitJob
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.store.memory_store import MemoryStore
from tests.builders import a_node

SCHEDULE = (0, 4, 7, 9, 10, 11, 11, 12)
ARCHITECTURE = {
    "family": "encoder", "layers": 12, "hidden": 2048, "heads": 32, "ffn": 8192,
    "vocabulary": 30522, "sequence_length": 512,
}  # fmt: skip
PROFILE = {"name": "large-bert", "architecture": ARCHITECTURE}
SPEC = JobSpec(
    name="train",
    min_gpus=8,
    max_gpus=8,
    steps=200_000,
    profile_json=json.dumps(PROFILE, sort_keys=True),
    global_batch=64,
    on_resize=OnResize.CHECKPOINT,
)


class _InlineExecutor(Executor):
    """A process pool that runs each call at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class _Service:
    """Two nodes of four T4 GPUs with a control loop and a curve builder."""

    def __init__(self) -> None:
        nodes = {name: replace(a_node(name, gpus=4), gpu="t4") for name in ("t0", "t1")}
        self.clock = ManualClock()
        self.codes: list[EventCode] = []
        self._store = MemoryStore(Snapshot(pools={"training": Pool("training", PoolKind.TRAINING)}, nodes=nodes))
        lease = self._store.acquire_lease("test", now_s=0.0, ttl_s=float("inf"))
        assert lease is not None
        self._epoch, self._executor = lease.epoch, SimulatedExecutor(nodes.values())
        self._builder = CurveBuilder(_InlineExecutor(), in_flight_max=4)
        self._policies = load_policy_set("ebbtide")

    @property
    def job(self) -> Job:
        return self.find_job("train")

    def find_job(self, job_id: str) -> Job:
        return self._store.load().snapshot.jobs[job_id]

    def freeze(self, layers: int) -> None:
        job = self.job
        steps = job.steps_at(self.clock.now_s())
        self.send(ReportProgress("train", job.allocation.generation, steps, frozen_layers=layers))

    def send(self, body: CommandBody) -> None:
        self._store.send(Command(f"{self.clock.now_s()}", self.clock.now_s(), body))

    def run(self, seconds: float) -> None:
        """Run a tick every ten seconds."""
        for _ in range(round(seconds / 10)):
            now_s = self.clock.now_s() + 10.0
            self.clock.move_to(now_s)
            self._executor.advance_to(now_s)
            inputs = self._builder.collect_finished(now_s)
            report = tick(
                self._store, self._executor, self.clock, self._policies, epoch=self._epoch, planning_inputs=inputs
            )
            assert not report.violations
            self.codes += [event.code for event in report.events]
            self._builder.request_shapes(self._store.load().snapshot, report.wanted_shapes)


def test_each_freeze_is_replanned_and_steps_get_shorter() -> None:
    service = _Service()
    service.send(SubmitJob("train", SPEC))
    service.run(300)
    jobs = []
    for layers in SCHEDULE:
        service.freeze(layers)
        service.run(600)
        jobs.append(service.job)
    assert [(job.state, job.freezing.layers, job.freezing.curve_layers) for job in jobs] == [
        (JobState.RUNNING, layers, layers) for layers in SCHEDULE
    ]
    plans = [job.allocation.plan for job in jobs]
    summaries = [plan.summarize() for plan in plans if plan]
    assert summaries == ["tp2 dp4 fsdp · 1 micro-batch"] + ["dp8 · 1 micro-batch"] * 7
    for before, after in pairwise(jobs):
        assert after.step_time_s() <= before.step_time_s()
    assert service.codes.count(EventCode.JOB_REARRANGED) == jobs[-1].account.resizes == len(set(plans)) - 1
    assert jobs[-1].account.lost_gpu_s == 0.0


def test_frozen_layers_free_gpus_for_a_pending_job() -> None:
    """Ten billion trained weights and their state do not fit on 4 GPUs. With 9 of 12 layers frozen, they do."""
    wide = PROFILE | {"architecture": {**ARCHITECTURE, "hidden": 8192, "ffn": 32768}}
    service = _Service()
    service.send(SubmitJob("train", replace(SPEC, min_gpus=4, profile_json=json.dumps(wide, sort_keys=True))))
    service.run(300)
    service.send(SubmitJob("next", JobSpec("next", 4, 4, steps=4_000)))
    service.run(600)
    assert (service.job.allocation.target_gpus, service.find_job("next").state) == (8, JobState.QUEUED)
    service.freeze(9)
    service.run(600)
    assert (service.job.allocation.target_gpus, service.find_job("next").state) == (4, JobState.RUNNING)
    service.run(2_000)
    assert (service.job.state, service.job.allocation.target_gpus) == (JobState.RUNNING, 8)
