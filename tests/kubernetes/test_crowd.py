"""A hundred jobs on fifty nodes, in calm and in storm: all finish, and no GPU is ever booked twice."""

from __future__ import annotations

import signal
import subprocess
import time
from random import Random

import pytest

from scheduler.k8s.kinds import CONFIG_MAP, ELASTIC_JOB, SECRET, SERVICE
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

JOBS, NODES = 100, 50
ALL_DONE_S = 420.0


def submit_all(operated: Operated, seed: int) -> None:
    rng = Random(seed)
    for number in range(JOBS):
        least = rng.choice((1, 1, 2, 4, 8, 12))
        operated.submit(f"job-{number:03d}", least, least * rng.choice((1, 2, 4)))


def phases(operated: Operated) -> list[str]:
    items = operated.cluster.list(ELASTIC_JOB, namespace=operated.namespace).items
    return [str(item.get("status", {}).get("phase", "")) for item in items]


def wait_for_all(operated: Operated) -> None:
    eventually(
        lambda: phases(operated).count("Succeeded") == JOBS, what="all jobs have succeeded", timeout_s=ALL_DONE_S
    )


def leftovers(operated: Operated) -> list[str]:
    """Objects of jobs beside their resources."""
    cluster, namespace = operated.cluster, operated.namespace
    found = [item for kind in (SERVICE, CONFIG_MAP, SECRET) for item in cluster.list(kind, namespace=namespace).items]
    names = [str(item["metadata"]["name"]) for item in (*found, *operated.pods())]
    return [name for name in names if "job-" in name]


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_hundred_jobs_finish_and_leave_nothing(operated: Operated) -> None:
    operated.add_nodes(NODES)
    operated.agents.steps = 40
    operated.start_operator()
    submit_all(operated, seed=1)
    wait_for_all(operated)
    eventually(lambda: not leftovers(operated), what="nothing is left but the resources")


@pytest.mark.parametrize("seed", [pytest.param(1), pytest.param(2, marks=pytest.mark.full)])
def test_operators_that_are_killed_at_any_time_lose_nothing(operated: Operated, seed: int) -> None:
    rng = Random(seed)
    operated.add_nodes(NODES)
    operated.agents.steps = 40
    running = [operated.start_operator(), operated.start_operator()]
    submit_all(operated, seed)
    for _ in range(5):
        time.sleep(rng.uniform(1.0, 6.0))
        kill(running.pop(rng.randrange(2)))
        running.append(operated.start_operator())
    wait_for_all(operated)
    eventually(lambda: not leftovers(operated), what="nothing is left but the resources")


@pytest.mark.parametrize("seed", [pytest.param(1), pytest.param(2, marks=pytest.mark.full)])
def test_an_api_server_that_dies_and_freezes_is_waited_for(
    operated: Operated, control_plane: ControlPlane, seed: int
) -> None:
    rng = Random(seed)
    operated.add_nodes(NODES)
    operated.agents.steps = 40
    operated.start_operator()
    submit_all(operated, seed)
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
    wait_for_all(operated)
    eventually(lambda: not leftovers(operated), what="nothing is left but the resources")
