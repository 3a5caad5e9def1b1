"""Random jobs and foreign pods on a cluster whose kubelets are strict: few rejections, each explained, no livelock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from scheduler.domain.commands import SubmitJob
from scheduler.domain.job_spec import JobSpec
from scheduler.kubernetes.api_objects import JOB_LABEL, labels_of
from scheduler.scheduling.policy_sets import list_policy_sets
from tests.pod_matrix import DRAIN_STEPS, check, is_hopeless, is_live, live_jobs, play
from tests.pod_world import World
from tests.random_pods import CLAIMS, RandomNode, make_job, make_node


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    opened: list[World] = []
    yield opened
    for world in opened:
        world.actions.close()


@pytest.mark.parametrize("policy", ["ebbtide", "fifo", "las"])
def test_random_jobs_and_pods_are_admitted(worlds: list[World], policy: str) -> None:
    worlds.append(world := World(policy))
    play(world, Random(1), nodes=6, jobs=30, foreign=30)
    check(world)
    assert not world.cluster.misfits


@pytest.mark.parametrize("policy", ["ebbtide", "fifo", "las"])
def test_each_rejection_by_a_broken_node_becomes_a_condition(worlds: list[World], policy: str) -> None:
    worlds.append(world := World(policy))
    world.cluster.broken_nodes.add(f"{world.namespace}-n0")
    rejected = play(world, Random(2), nodes=6, jobs=30, foreign=10)
    refused = {labels_of(pod)[JOB_LABEL] for pod, _ in world.rejections if JOB_LABEL in labels_of(pod)}
    assert len(refused) > 3
    assert {job_id for job_id, _, _ in rejected.reported} == refused


@pytest.mark.parametrize("policy", ["ebbtide", "fifo", "las"])
def test_no_job_starts_later_because_of_hopeless_ones(worlds: list[World], policy: str) -> None:
    compare_start_times(worlds, policy, Random(3), jobs=40)


@pytest.mark.full
@pytest.mark.parametrize("policy", sorted(list_policy_sets()))
def test_no_job_starts_later_because_of_hopeless_ones_under_each_policy(worlds: list[World], policy: str) -> None:
    compare_start_times(worlds, policy, Random(4), jobs=80)


def compare_start_times(worlds: list[World], policy: str, rng: Random, *, jobs: int) -> None:
    """Submit the same jobs at the same times, first beside the hopeless ones, then without them."""
    nodes = [make_node(rng, f"jobs-n{number}") for number in range(6)]
    specs = [make_job(rng, number, namespace="jobs") for number in range(jobs)]
    started_s, hopeless = start_times_of(worlds, policy, nodes, specs)
    alone_s, _ = start_times_of(worlds, policy, nodes, [None if job.name in hopeless else job for job in specs])
    assert len(hopeless) > 3
    assert started_s.keys() == alone_s.keys() == {job.name for job in specs} - hopeless
    late = {name: at_s - alone_s[name] for name, at_s in started_s.items() if at_s > alone_s[name]}
    assert not late


def start_times_of(
    worlds: list[World], policy: str, nodes: Sequence[RandomNode], jobs: Sequence[JobSpec | None]
) -> tuple[dict[str, float], set[str]]:
    """Submit two jobs at each step. Return when each one started, and the names of those that never did."""
    worlds.append(world := World(policy))
    for node in nodes:
        world.add_random_node(node)
    for claim, zones in CLAIMS.items():
        world.add_claim(claim, zones)
    started_s: dict[str, float] = {}
    for step in range(DRAIN_STEPS):
        for job in jobs[2 * step : 2 * step + 2]:
            if job is not None:
                world.send(SubmitJob(job.name, job))
        for job_id, record in world.step().jobs.items():
            if (at_s := record.account.first_started_at_s) is not None:
                started_s.setdefault(job_id, at_s)
        live, has_pods = live_jobs(world), any(is_live(pod) for pod in world.list_pods())
        if 2 * step > len(jobs) and not has_pods and all(is_hopeless(world, job) for job in live):
            break
    assert not world.violations
    return started_s, {job.id for job in live_jobs(world)}


@pytest.mark.full
@pytest.mark.parametrize("policy", sorted(list_policy_sets()))
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_random_jobs_and_pods_are_admitted_under_each_policy(worlds: list[World], policy: str, seed: int) -> None:
    worlds.append(world := World(policy))
    play(world, Random(seed), nodes=8, jobs=60, foreign=60)
    check(world)
    assert not world.cluster.misfits


@pytest.mark.full
def test_ten_thousand_jobs_and_pods_are_admitted(worlds: list[World]) -> None:
    worlds.append(world := World())
    play(world, Random(1), nodes=40, jobs=5000, foreign=5000)
    check(world)
    assert not world.cluster.misfits
