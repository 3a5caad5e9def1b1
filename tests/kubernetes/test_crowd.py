"""A hundred jobs on fifty nodes, in calm and in storm: all finish, and no GPU is ever booked twice."""

from __future__ import annotations

import time
from random import Random

import pytest

from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.crowd import kill, submit_all, wait_for_all
from tests.kubernetes.operated import Operated

JOBS, NODES = 100, 50


def test_a_hundred_jobs_finish_and_leave_nothing(operated: Operated) -> None:
    operated.add_nodes(NODES)
    operated.agents.steps = 40
    operated.start_operator()
    submit_all(operated, JOBS, seed=1)
    wait_for_all(operated, JOBS)


@pytest.mark.parametrize("seed", [pytest.param(1), pytest.param(2, marks=pytest.mark.full)])
def test_operators_that_are_killed_at_any_time_lose_nothing(operated: Operated, seed: int) -> None:
    rng = Random(seed)
    operated.add_nodes(NODES)
    operated.agents.steps = 40
    running = [operated.start_operator(), operated.start_operator()]
    submit_all(operated, JOBS, seed)
    for _ in range(5):
        time.sleep(rng.uniform(1.0, 6.0))
        kill(running.pop(rng.randrange(2)))
        running.append(operated.start_operator())
    wait_for_all(operated, JOBS)


@pytest.mark.parametrize("seed", [pytest.param(1), pytest.param(2, marks=pytest.mark.full)])
def test_an_api_server_that_dies_and_freezes_is_waited_for(
    operated: Operated, control_plane: ControlPlane, seed: int
) -> None:
    rng = Random(seed)
    operated.add_nodes(NODES)
    operated.agents.steps = 40
    operated.start_operator()
    submit_all(operated, JOBS, seed)
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
    wait_for_all(operated, JOBS)
