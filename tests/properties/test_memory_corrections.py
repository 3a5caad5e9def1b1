"""Jobs that run out of memory or freeze layers at any time never start on a plan that does not fit, and never wait
forever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, CurveSolved, ReportProgress, SubmitJob
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_records import OOM_ATTEMPTS_MAX
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import PLACED_STATES, JobState
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Stage
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.store.memory_store import MemoryStore
from tests.builders import GPU, GPU_BYTES, a_fleet

SEEDS = st.integers(min_value=0, max_value=10**9)
TICKS = 60
LAYERS = 12


class RandomRun:
    """A small cluster whose jobs take up to twice the predicted memory and freeze layers now and then.

    `started` counts what happened.
    """

    def __init__(self, seed: int, policy: str) -> None:
        self._random = Random(seed)
        self._policies = load_policy_set(policy)
        self._clock, self._store = ManualClock(), MemoryStore()
        lease = self._store.acquire_lease("test", now_s=0.0, ttl_s=float("inf"))
        assert lease is not None
        self._epoch, self._sent = lease.epoch, 0
        pools, nodes = a_fleet(training=2, inference=0, gpus_per_node=4)
        self._executor = SimulatedExecutor(nodes.values())
        self._truth = {f"j{at}": self._random.uniform(0.8, 2.0) for at in range(5)}
        self._asked: Counter[tuple[str, int]] = Counter()
        for pool in pools.values():
            self._send(CreatePool(pool))
        for node in nodes.values():
            self._send(AddNode(node))
        for job_id in self._truth:
            self._send(SubmitJob(job_id, self._spec(job_id)))
        self.started = Counter[str]()

    def run(self) -> Snapshot:
        for _ in range(TICKS):
            self._tick(self._random.choice((1.0, 7.0, 25.0)), quiet=False)
        return self._store.load().snapshot

    def run_until_stable(self) -> Snapshot:
        """Run long enough without kills and freezes for every backoff and every solved curve to take effect."""
        for _ in range(20):
            self._tick(25.0, quiet=True)
        return self._store.load().snapshot

    def _tick(self, seconds: float, *, quiet: bool) -> None:
        self._clock.move_to(self._clock.now_s() + seconds)
        self._executor.advance_to(self._clock.now_s())
        for job in self._store.load().snapshot.jobs.values() if not quiet else ():
            self._maybe_freeze(job)
            self._maybe_kill(job)
        before = self._store.load().snapshot
        report = tick(self._store, self._executor, self._clock, self._policies, epoch=self._epoch)
        assert not report.violations, report.violations
        after = self._store.load().snapshot
        for job in after.jobs.values():
            self._check(before.jobs.get(job.id), job)
        for wanted in report.wanted_shapes:
            if quiet or self._random.random() < 0.5:
                self._send(self._solved(wanted.curve_key, wanted.shape))

    def _spec(self, job_id: str) -> JobSpec:
        least = self._random.choice((1, 2, 4))
        model = self._random.choice(("llama-2-7b", "llama-2-7b", ""))
        most = least * self._random.choice((1, 2))
        steps = self._random.choice((50, 5_000))
        return JobSpec(job_id, least, most, model=model, global_batch=8, steps=steps, on_resize=OnResize.CHECKPOINT)

    def _solved(self, key: str, shape: GpuShape) -> CurveSolved:
        """Return the fastest of a few strategies that fits, like a solver; occasionally none does."""
        message = dict(part.rpartition("-")[::2] for part in key.split("/"))
        percent, frozen = int(message.get("memory", "100")), int(message.get("frozen", "0"))
        for gigabytes, slower in ((80, 1.0), (64, 1.2), (45, 1.5), (30, 2.0)):
            peak_bytes = gigabytes * 2**30 * 2 // (1 + shape.gpus) * (2 * LAYERS - frozen) // (2 * LAYERS)
            if peak_bytes * percent <= 100 * GPU_BYTES:
                step_s = slower / shape.gpus * (2 * LAYERS - frozen) / (2 * LAYERS)
                return CurveSolved(key, shape, a_plan(shape.gpus, step_s, peak_bytes))
        return CurveSolved(key, shape, None, "needs more than there is")

    def _maybe_freeze(self, job: Job) -> None:
        if job.state is JobState.RUNNING and job.freezing.layers < LAYERS and self._random.random() < 0.1:
            layers = self._random.randint(job.freezing.layers + 1, LAYERS)
            self._send(ReportProgress(job.id, job.allocation.generation, 0.0, frozen_layers=layers))

    def _maybe_kill(self, job: Job) -> None:
        """Kill a job whose true memory use does not fit; one of unknown use at a random time."""
        plan = job.allocation.plan
        if job.state is not JobState.RUNNING or plan is None:
            return
        used = round(plan.peak_bytes_per_gpu * self._truth[job.id])
        if used > GPU_BYTES or (not used and self._random.random() < 0.1):
            self._executor.run_out_of_memory(job.id, peak_bytes=min(used, GPU_BYTES) or GPU_BYTES)

    def _check(self, before: Job | None, job: Job) -> None:
        assert len(job.memory.deaths) <= OOM_ATTEMPTS_MAX
        assert (job.state is JobState.FAILED) is (len(job.memory.deaths) == OOM_ATTEMPTS_MAX) or job.is_ended
        is_new = before is None or before.allocation.generation != job.allocation.generation
        if job.state in PLACED_STATES and is_new:
            assert job.allocation.plan is not None
            assert job.memory.fits(job.allocation.plan.peak_bytes_per_gpu, GPU_BYTES)
            assert job.retry_at_s <= self._clock.now_s()
            self.started["corrected" if job.memory.percent > 100 else "plain"] += 1
            self.started["corrected and frozen"] += "/memory-" in job.curve_key and "/frozen-" in job.curve_key
        if before is not None and len(job.memory.deaths) > len(before.memory.deaths):
            self.started["died"] += 1
            plan = before.allocation.plan
            assert (
                plan is None or not plan.peak_bytes_per_gpu or not job.memory.fits(plan.peak_bytes_per_gpu, GPU_BYTES)
            )
            assert job.account.failures == before.account.failures
            assert job.freezing.is_curve_current, "it has no plan to go on with"

    def _send(self, body: CommandBody) -> None:
        self._sent += 1
        self._store.send(Command(f"c{self._sent}", self._clock.now_s(), body))


def a_plan(gpus: int, step_s: float, peak_bytes: int) -> ParallelPlan:
    """Return data parallelism of a model of `LAYERS` layers; plans of other peaks also differ in micro-batches."""
    stage = Stage(0, LAYERS - 1, GPU, gpus, (LayerStrategy(LAYERS, dp=gpus),))
    plan = replace(build_data_parallel_plan(GPU, gpus), stages=(stage,), iteration_time_s=step_s)
    return replace(plan, peak_bytes_per_gpu=peak_bytes, micro_batches=1 + peak_bytes // 2**30)


@pytest.mark.parametrize("policy", ["ebbtide", "fifo", "lyra", "afs"])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS)
def test_jobs_start_only_on_plans_that_fit_with_their_correction(policy: str, seed: int) -> None:
    RandomRun(seed, policy).run()


@pytest.mark.parametrize("policy", ["ebbtide", "fifo", "lyra", "afs"])
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS)
def test_jobs_resume_after_backoff_and_curve_solving(policy: str, seed: int) -> None:
    play = RandomRun(seed, policy)
    play.run()
    for job in play.run_until_stable().jobs.values():
        assert job.state not in (JobState.SUBMITTED, JobState.PLANNING), job
        assert job.freezing.is_curve_current, job


def test_random_runs_cover_kills_corrections_and_recovery() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        play = RandomRun(seed, "ebbtide")
        play.run()
        seen += play.started
    assert min(seen["plain"], seen["corrected"], seen["died"], seen["corrected and frozen"]) >= 20, seen
