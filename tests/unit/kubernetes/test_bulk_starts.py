"""Many starts at once are spread over ticks; deletions and recalls are not delayed by them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scheduler.domain.commands import CancelJob, SubmitJob
from scheduler.domain.job_spec import JobSpec
from scheduler.kubernetes.api_objects import JOB_LABEL
from tests.pod_world import World
from tests.random_pods import RandomNode

NODES, AVAILABLE = 40, 50.0
CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "20", "ephemeral-storage": "1Ti"}
REQUESTS_TO_CREATE = 6
"""Of a job with two pods."""


@pytest.fixture
def world() -> Iterator[World]:
    world = World(available_requests=lambda: AVAILABLE)
    for number in range(NODES):
        world.add_random_node(RandomNode(f"node-{number:02d}", gpus=8, capacity=CAPACITY, labels={}, taints=[]))
    world.step()
    yield world
    world.actions.close()


def submit(world: World, *names: str) -> None:
    for name in names:
        world.send(SubmitJob(name, JobSpec(name, 16, 16, steps=10**9, command=("python", "train.py"))))


def pods_of(world: World, job_id: str) -> int:
    return sum(pod["metadata"]["labels"][JOB_LABEL] == job_id for pod in world.cluster.list_pods())


def test_starts_take_half_of_the_available_requests_in_a_tick(world: World) -> None:
    names = [f"job-{number:02d}" for number in range(12)]
    submit(world, *names)
    world.step()
    created = [name for name in names if pods_of(world, name)]
    assert len(created) == AVAILABLE / 2 // REQUESTS_TO_CREATE
    assert created == names[: len(created)]
    seen = {name: pods_of(world, name) for name in names}
    was_deferred = [world.executor.has_deferred_starts]
    for _ in names:
        world.step()
        seen = {name: max(seen[name], pods_of(world, name)) for name in names}
        was_deferred.append(world.executor.has_deferred_starts)
    assert was_deferred[0]
    assert not was_deferred[-1]
    assert set(seen.values()) == {2}
    assert not world.violations


def test_deletions_do_not_wait_for_starts(world: World) -> None:
    submit(world, "victim")
    world.step()
    world.step()
    assert pods_of(world, "victim") == 2
    submit(world, *(f"job-{number:02d}" for number in range(18)))
    world.step()
    world.send(CancelJob("victim"))
    world.step()
    assert world.executor.has_deferred_starts
    assert pods_of(world, "victim") == 0
