"""The service of the demo: real and simulated nodes under one controller, and the demo from start to end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.demo.demo_routes import DemoRoutes
from cli.demo.real_trainings import NODES, POOL, create_real_fleet
from cli.demo.scenario import SETTINGS
from cli.demo.service_process import DemoService
from cli.demo.simulated_fleet import CONTAINMENT, GPU, INFERENCE_POOL, create_simulated_fleet, list_nodes
from ebbtide.client import Client
from ebbtide.client.views import NodeSummaryView

TIMEOUT_S = 90.0


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[DemoService]:
    service = DemoService(tmp_path, SETTINGS)
    yield service
    service.stop()
    assert service.find_leftover_processes() == []


def wait_until(is_done: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + TIMEOUT_S
    while not is_done():
        assert time.monotonic() < give_up_at_s
        time.sleep(0.2)


def submit(client: Client, name: str, gpu: str, command: list[str]) -> str:
    document = {"name": name, "gpu": gpu, "gpus": {"min": 1, "max": 1}, "steps": 2, "command": command}
    return str(client.submit(document)["id"])


def test_real_and_simulated_jobs_run_under_one_controller(demo: DemoService) -> None:
    with demo.wait_until_ready() as client, DemoRoutes(demo.url, demo.token) as routes:
        create_real_fleet(client)
        create_simulated_fleet(client, demo.url)
        expected = {*NODES, *(node.name for node in list_nodes())}
        wait_until(lambda: {node["name"] for node in list_up_nodes(client)} == expected)
        assert {machine["containment"] for machine in client.machines() if machine["name"].startswith("sim-")} == {
            CONTAINMENT
        }
        jobs = [submit(client, "real", "cpu", ["python", "-c", "pass"]), submit(client, "sim-job", GPU, ["simulated"])]
        wait_until(lambda: all(client.job(job_id)["state"] == "succeeded" for job_id in jobs))
        surge = routes.surge()["surge_gpus"]
        assert surge.keys() == {POOL, INFERENCE_POOL}
        wait_until(lambda: sum(node["inference"] for node in client.overview()["nodes"]) >= surge[INFERENCE_POOL])


def list_up_nodes(client: Client) -> list[NodeSummaryView]:
    return [node for node in client.overview()["nodes"] if node["state"] != "down"]


@pytest.mark.full
def test_every_claim_of_the_demo_holds() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cli", "demo"], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 recalls late, losses equal to an uninterrupted run" in done.stdout
