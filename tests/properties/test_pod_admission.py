"""Random jobs and foreign pods on a cluster whose kubelets are strict: few rejections, each explained, no livelock."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from scheduler.scheduling.policy_sets import list_policy_sets
from tests.pod_matrix import check, play
from tests.pod_world import World


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
