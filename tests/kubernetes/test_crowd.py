"""A hundred jobs on fifty nodes, with and without failures: all complete and no GPU is allocated twice."""

from __future__ import annotations

import time
from random import Random

import pytest

from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.crowd import kill, submit_all, wait_for_all
from tests.kubernetes.operated import Operated

JOBS, NODES = 100, 50
CROWDS = [(40, 20, 1), *(pytest.param(JOBS, NODES, seed, marks=pytest.mark.full) for seed in (1, 2))]
crowds = pytest.mark.parametrize(("jobs", "nodes", "seed"), CROWDS)


def test_hundred_jobs_complete_and_leave_nothing(operated: Operated) -> None:
    operated.add_nodes(NODES)
    operated.agents.steps = 40
    operated.start_operator()
    submit_all(operated, JOBS, seed=1)
    wait_for_all(operated, JOBS)


@crowds
def test_killed_operators_lose_nothing(operated: Operated, jobs: int, nodes: int, seed: int) -> None:
    rng = Random(seed)
    operated.add_nodes(nodes)
    operated.agents.steps = 4000 // jobs
    running = [operated.start_operator(), operated.start_operator()]
    submit_all(operated, jobs, seed)
    for _ in range(5):
        time.sleep(rng.uniform(1.0, 6.0))
        kill(running.pop(rng.randrange(2)))
        running.append(operated.start_operator())
    wait_for_all(operated, jobs)


@crowds
def test_api_server_outages_are_survived(
    operated: Operated, control_plane: ControlPlane, jobs: int, nodes: int, seed: int
) -> None:
    rng = Random(seed)
    operated.add_nodes(nodes)
    operated.agents.steps = 4000 // jobs
    operated.start_operator()
    submit_all(operated, jobs, seed)
    for number in range(4):
        time.sleep(rng.uniform(1.0, 5.0))
        if number % 2:
            control_plane.kill_api()
            time.sleep(rng.uniform(0.0, 3.0))
            control_plane.start_api()
        else:
            control_plane.pause_api()
            time.sleep(rng.uniform(1.0, 6.0))
            control_plane.resume_api()
    wait_for_all(operated, jobs)
