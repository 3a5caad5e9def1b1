"""Allotments of jobs with deadlines, replayed with GPUs by count, speeds by the curve and no cost of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.allotment import Allot, Allotment, Candidate, candidates_by_model, curve_speeds
from scheduler.scheduling.policies.elastic_deadline import (
    AvailabilityProfile,
    compute_minimum_shares,
    earliest_deadline_first,
    elastic_deadline_shares,
)
from scheduler.scheduling.policies.elastic_share import elastic_shares
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import GPU, a_curve, a_fleet, a_job, a_snapshot

GPUS = 16
FLEET = a_fleet(training=1, inference=0, gpus_per_node=GPUS)
SETTINGS = PolicySettings()


@dataclass
class World:
    """Jobs in the system, and the speeds of all jobs so far."""

    random: Random
    jobs: dict[str, Job]
    speeds: dict[str, dict[int, float]]
    met: set[str]
    now_s: float = 0.0

    def snapshot(self) -> Snapshot:
        curves = {
            job.spec.curve_key: a_curve(
                {GpuShape.packed(GPU, count, GPUS): 1.0 / speed for count, speed in self.speeds[job_id].items()}
            )
            for job_id, job in self.jobs.items()
        }
        return a_snapshot(FLEET, self.jobs.values(), curves=curves, now_s=self.now_s)

    def submit(self, number: int) -> None:
        """Submit a job for powers of two, every count, or counts with gaps, with a feasible deadline."""
        random, job_id = self.random, f"j{number}"
        every, some = list(range(random.randint(1, 4), 13)), random.sample(range(1, 17), 3)
        counts = random.choice([[1, 2, 4, 8, 16], every, some])
        scaling = random.uniform(0.5, 1.0)
        self.speeds[job_id] = {count: count**scaling for count in counts}
        steps = random.randint(10, 3000)
        deadline_s = steps / max(self.speeds[job_id].values()) * random.uniform(1.0, 6.0)
        spec: dict[str, Any] = {"steps": steps, "deadline_s": deadline_s, "model": job_id, "global_batch": 8}
        self.jobs[job_id] = a_job(job_id, min(counts), max(counts), now_s=self.now_s, **spec)

    def run(self, allotment: Allotment, until_s: float) -> None:
        """Run the jobs on their allotment until the next one ends, or until `until_s`."""
        rates = {job_id: self.speeds[job_id].get(allotment.gpus.get(job_id, 0), 0.0) for job_id in self.jobs}
        left = {job_id: job.spec.steps - job.progress.steps for job_id, job in self.jobs.items()}
        ends = [self.now_s + left[job_id] / rate for job_id, rate in rates.items() if rate]
        end_s = min([*ends, until_s])
        for job_id, job in list(self.jobs.items()):
            done = job.progress.steps + rates[job_id] * (end_s - self.now_s)
            if done < job.spec.steps - 1e-6:
                count = allotment.gpus.get(job_id, 0)
                held = replace(job.allocation, target={"t0": tuple(range(count))} if count else {})
                state = JobState.RUNNING if count else JobState.QUEUED
                self.jobs[job_id] = replace(job, state=state, allocation=held, progress=Progress(end_s, done))
            else:
                del self.jobs[job_id]
                if end_s <= job.deadline_at_s + 1e-6:
                    self.met.add(job_id)
        self.now_s = end_s


def replayed(seed: int, allot: Allot) -> Iterator[tuple[World, Allotment]]:
    """Submit up to 15 jobs over time, and yield the world before each step with its allotment."""
    random = Random(seed)
    world = World(random, {}, {}, set())
    arrivals_s = sorted(random.uniform(0.0, 1500.0) for _ in range(random.randint(3, 15)))
    for number, at_s in enumerate([*arrivals_s, float("inf")]):
        while world.now_s < at_s and (world.jobs or at_s < float("inf")):
            allotment = allot(world.snapshot(), GPUS, SETTINGS)
            yield world, allotment
            world.run(allotment, at_s)
        if at_s < float("inf"):
            world.submit(number)


@pytest.mark.parametrize("allot", [earliest_deadline_first, elastic_deadline_shares, elastic_shares])
def test_allotment_fits_and_explains_every_other_job(allot: Allot) -> None:
    for seed in range(15):
        for world, allotment in replayed(seed, allot):
            assert sum(allotment.gpus.values()) <= GPUS
            assert not allotment.gpus.keys() & allotment.waiting.keys()
            assert allotment.gpus.keys() | allotment.waiting.keys() == world.jobs.keys()
            assert all(world.jobs[job_id].spec.min_gpus <= count for job_id, count in allotment.gpus.items())


@pytest.mark.parametrize("allot", [earliest_deadline_first, elastic_deadline_shares])
def test_counts_have_a_plan(allot: Allot) -> None:
    for seed in range(15):
        for world, allotment in replayed(seed, allot):
            assert all(count in world.speeds[job_id] for job_id, count in allotment.gpus.items())


def test_admitted_jobs_meet_their_deadlines() -> None:
    """At most one in a hundred does not: admission is repeated at each step, and a later job may come first then."""
    admitted: set[tuple[int, str]] = set()
    broken: set[tuple[int, str]] = set()
    for seed in range(40):
        of_seed: set[str] = set()
        for world, _ in replayed(seed, elastic_deadline_shares):
            ((_, candidates),) = candidates_by_model(world.snapshot(), GPUS, curve_speeds()) or [(0, [])]
            of_seed |= compute_minimum_shares(candidates, GPUS, world.now_s).keys()
        admitted |= {(seed, job_id) for job_id in of_seed}
        broken |= {(seed, job_id) for job_id in of_seed - world.met}
    assert len(broken) <= 0.01 * len(admitted)
    assert len(admitted) > 200


def test_reserved_shares_do_not_overlap_and_meet_their_deadlines() -> None:
    random = Random(7)
    for _ in range(200):
        horizon, deadlines_s = (
            AvailabilityProfile.constant(GPUS),
            sorted(random.uniform(10.0, 1000.0) for _ in range(8)),
        )
        for deadline_s in deadlines_s:
            counts = np.array([0, *sorted(random.sample(range(1, 17), random.randint(1, 5)))])
            one = Candidate(a_job("j"), counts, counts ** random.uniform(0.5, 1.0), random.uniform(10.0, 3000.0))
            if reserved := horizon.reserve_share(one, deadline_s):
                left = reserved[0].free
                assert finished_steps(horizon, reserved[0], one, deadline_s) == pytest.approx(one.steps, rel=1e-6)
                assert (left >= 0).all()
                assert reserved[1] == horizon.free[0] - left[0]
                horizon = reserved[0]


def finished_steps(before: AvailabilityProfile, after: AvailabilityProfile, one: Candidate, deadline_s: float) -> float:
    """Return the steps finished by the deadline on the reserved GPUs. Each count must have a speed."""
    speed_of: Callable[[int], float] = dict(zip(one.counts.tolist(), one.speeds.tolist(), strict=True)).__getitem__
    ends_s = [*after.starts_s[1:].tolist(), float("inf")]
    done = 0.0
    for start_s, end_s, left in zip(after.starts_s.tolist(), ends_s, after.free.tolist(), strict=True):
        had = int(before.free[before.starts_s.searchsorted(start_s, side="right") - 1])
        if had > left:
            assert end_s <= deadline_s + 1e-6
            done += (end_s - start_s) * speed_of(had - left)
    return done
