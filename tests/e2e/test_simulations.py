"""Simulations over HTTP: real API processes, one of them killed, compared with the command line's report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebbtide.client import Client, ProblemError
from tests.e2e.webhook_harness import ROOT, run_webhooks
from tests.webhook_receiver import wait_for

pytestmark = pytest.mark.e2e

CLUSTER = """pools:
  - {name: training, kind: training, nodes: 2, gpus_per_node: 8, gpu: a100-80g}
  - {name: inference, kind: inference, nodes: 2, gpus_per_node: 8, gpu: a100-80g}
elastic: {from_gpus: 2}
"""
DEMAND = "time_s,pool,gpus\n" + "".join(f"{300 * at},inference,{at % 7}\n" for at in range(300))
MEASURED = ("tick_s", "wall_s")


@dataclass(frozen=True)
class Api:
    url: str
    process: subprocess.Popen[bytes]
    client: Client


def jobs_csv(count: int) -> str:
    rows = (f"j{at},{at * 60},{600 + 97 * (at % 31)},{1 + at % 8}\n" for at in range(count))
    return "job_id,submit_time_s,duration_s,gpus\n" + "".join(rows)


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    """Return the report without the measured run times."""
    policies = [{name: each[name] for name in each if name not in MEASURED} for each in document["policies"]]
    return {**document, "policies": policies}


def players(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [each for each in psutil.Process(process.pid).children(recursive=True) if is_player(each)]


def is_player(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return "scheduler.simulator.simulation_process" in process.cmdline()
    return False


def wait_until(client: Client, simulation: str, *states: str) -> None:
    wait_for(lambda: client.simulation(simulation)["state"] in states, lambda: client.simulation(simulation))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with run_webhooks(tmp_path_factory.mktemp("api")) as harness:
        process, client = harness.start_api(SIMULATION_BODY_BYTES="500000")
        yield Api(harness.url, process, client)


def test_simulation_over_http_equals_the_command_line(api: Api, tmp_path: Path) -> None:
    texts = {"jobs.csv": jobs_csv(60), "demand.csv": DEMAND, "cluster.yaml": CLUSTER}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    inputs = ["--jobs", "jobs.csv", "--demand", "demand.csv", "--cluster", "cluster.yaml"]
    options = ["--policy", "ebbtide,fifo", "--seed", "7", "-o", "json"]
    command = [sys.executable, "-m", "cli", "simulations", "submit", *inputs, *options, "--watch"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "EBBTIDE_URL": api.url}
    remote = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    listed = next(api.client.simulations())
    assert (listed["state"], listed["progress"]["jobs_done"], listed["tries"]) == ("succeeded", 120, 1)
    assert listed["progress"]["fraction"] == 1.0
    report = json.loads(remote.stdout)
    assert report == api.client.simulation_report(listed["id"])
    with pytest.raises(ProblemError, match="succeeded"):
        api.client.cancel_simulation(listed["id"])
    command = [sys.executable, "-m", "cli", "simulate", *inputs, *options, "--processes", "1"]
    local = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert without_times(report) == without_times(json.loads(local.stdout))


@pytest.mark.full
def test_cancelled_simulation_stops_at_once(api: Api) -> None:
    client = api.client
    first = client.create_simulation(jobs_csv(20_000), CLUSTER, demand=DEMAND, policies=["fifo", "ebbtide"])
    waiting = client.create_simulation(jobs_csv(5), CLUSTER, demand=DEMAND)
    wait_for(lambda: client.simulation(first["id"])["progress"]["jobs_done"] > 0)
    playing = client.simulation(first["id"])
    assert playing["progress"]["playing"] == "fifo"
    assert 0 < playing["progress"]["fraction"] < 1
    assert client.simulation(waiting["id"])["state"] == "queued"
    (player,) = players(api.process)
    assert player.nice() >= 10
    with pytest.raises(ProblemError, match="running"):
        client.simulation_report(first["id"])
    assert client.cancel_simulation(first["id"])["state"] == "cancelled"
    assert client.cancel_simulation(first["id"])["state"] == "cancelled"
    wait_until(client, waiting["id"], "succeeded")
    assert not player.is_running()


@pytest.mark.full
def test_another_api_restarts_the_simulation_of_a_killed_one(tmp_path: Path) -> None:
    with run_webhooks(tmp_path) as harness:
        doomed, client = harness.start_api()
        made = client.create_simulation(jobs_csv(100), CLUSTER, demand=DEMAND, policies=["fifo"])
        wait_for(lambda: players(doomed) != [])
        (player,) = players(doomed)
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        wait_for(lambda: not player.is_running() or player.status() == psutil.STATUS_ZOMBIE)
        _, other = harness.start_api()
        wait_until(other, made["id"], "succeeded")
        assert other.simulation(made["id"])["tries"] == 2


def test_invalid_file_is_rejected_with_file_line_and_column(api: Api) -> None:
    client, before = api.client, list(api.client.simulations())
    row = "a,0,100,1\n"
    head = "job_id,submit_time_s,duration_s,gpus\n"
    for jobs, cluster, problem in (
        (head + row + "b,10,,2\n", CLUSTER, ("jobs.csv", "line 3", "duration_s", "''")),
        (head + row + "b,10,5,99\n", CLUSTER, ("jobs.csv", "line 3", "gpus", "50", "16")),
        (
            head + row,
            CLUSTER.replace("a100-80g", "a100-80x", 1),
            ("cluster.yaml", "line 2", "pools.0.gpu", "'a100-80x'"),
        ),
        (head + row, "pools: [", ("cluster.yaml", "line 1", "YAML")),
    ):
        with pytest.raises(ProblemError) as error:
            client.create_simulation(jobs, cluster, demand=DEMAND)
        assert error.value.status == 422
        assert [text for text in problem if text not in error.value.detail] == [], error.value.detail
        assert "/tmp" not in error.value.detail
    with pytest.raises(ProblemError, match=r"'ebbtid'.*'ebbtide'"):
        client.create_simulation(head + row, CLUSTER, demand=DEMAND, policies=["ebbtid"])
    with pytest.raises(ProblemError, match="inference"):
        client.create_simulation(head + row, CLUSTER)
    with pytest.raises(ProblemError, match="500000 bytes") as too_large:
        client.create_simulation(head + row, CLUSTER + "#" * 500_000, demand=DEMAND)
    assert too_large.value.status == 413
    assert list(client.simulations()) == before
