"""Laws of speeds per GPU model in generated states: legal decisions, and no change where all GPUs are alike."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.speed import relative_speeds
from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from scheduler.solver.profiles.gpu_throughput import list_throughputs
from tests.builders import GPU
from tests.properties.test_scheduling_invariants import SEEDS, WORLDS, violations
from tests.properties.unlike_worlds import UNLIKE, an_unlike_world
from tests.properties.worlds import a_world

FEWER_WORLDS = settings(WORLDS, max_examples=30)


def with_speeds(snapshot: Snapshot, seed: int) -> Snapshot:
    """Return the snapshot with the table of the profiles; some jobs declare speeds."""
    random = Random(f"speeds/{seed}")
    jobs = {job_id: with_declared_speeds(random, job) for job_id, job in snapshot.jobs.items()}
    return replace(snapshot, jobs=jobs, gpu_throughputs=list_throughputs())


def with_declared_speeds(random: Random, job: Job) -> Job:
    if job.spec.has_profile or random.random() < 0.5:
        return job
    return replace(
        job, spec=replace(job.spec, speeds={GPU: random.uniform(0.5, 2.0), UNLIKE: random.uniform(0.1, 3.0)})
    )


def with_measurements(random: Random, job: Job) -> Job:
    """Return a job without a model, perhaps as if it had run on both GPU models."""
    if job.spec.has_profile or random.random() < 0.5:
        return job
    progress = job.progress
    for gpu in random.sample((GPU, UNLIKE), 2):
        progress = progress.with_measured_gpu_s(gpu, random.choice((1, 4, 8)), random.uniform(0.5, 5.0))
    return replace(job, progress=progress)


@pytest.mark.parametrize("policy", list_policy_sets())
@FEWER_WORLDS
@given(seed=SEEDS)
def test_speeds_change_nothing_in_a_fleet_of_one_model(policy: str, seed: int) -> None:
    world = a_world(seed)
    plain = update_snapshot(world.snapshot, world.observation, ()).snapshot
    known = update_snapshot(with_speeds(world.snapshot, seed), world.observation, ()).snapshot
    policies = load_policy_set(policy)
    assert decide(known, policies) == decide(plain, policies)


@pytest.mark.parametrize("policy", list_policy_sets())
@FEWER_WORLDS
@given(seed=SEEDS)
def test_decisions_are_legal_in_a_fleet_of_two_models(policy: str, seed: int) -> None:
    world, random = an_unlike_world(seed), Random(f"measured/{seed}")
    snapshot = with_speeds(world.snapshot, seed)
    snapshot = replace(snapshot, jobs={name: with_measurements(random, job) for name, job in snapshot.jobs.items()})
    updated = update_snapshot(snapshot, world.observation, ()).snapshot
    assert violations(updated, decide(updated, load_policy_set(policy)).decisions) == []
    for job in updated.jobs.values():
        speeds = relative_speeds(updated, job)
        assert all(0.0 < speed.value < float("inf") for speed in speeds.values())
        if job.spec.speeds and UNLIKE in speeds:
            declared = job.spec.speeds[UNLIKE] / job.spec.speeds[GPU]
            assert speeds[UNLIKE].value / speeds[GPU].value == pytest.approx(declared)
