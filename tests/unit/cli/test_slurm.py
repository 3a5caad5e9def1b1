"""`ebbtide slurm` against the API in this process and stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from cli.exit_codes import ExitCode
from ebbtide.client import Client
from tests.unit.cli.conftest import InProcessService, Run

_SQUEUE_WIDTH = 250
JOIN = ("--join", "https://ebbtide.example")
WATCH = ("slurm", "watch", "--gpus-per-node", "4", "--nodes-max", "8", "--once", *JOIN)


class FakeSlurm:
    """`sbatch` that stores scripts, and `squeue` that lists what the test states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._write("squeue", f"cat {folder}/jobs")
        self._write("sbatch", f"n=$(ls {folder} | wc -l); cat > {folder}/script-$n; echo $n")
        self.list_jobs()

    def list_jobs(self, *jobs: tuple[str, str, int]) -> None:
        """State the pilots of pool `training`: id, state and number of nodes."""
        rows = ((job_id, "ebbtide-training", state, str(nodes), "N/A", "") for job_id, state, nodes in jobs)
        lines = ("".join(column.ljust(_SQUEUE_WIDTH) for column in row) for row in rows)
        (self.folder / "jobs").write_text("\n".join(lines))

    @property
    def scripts(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("script-*"))]

    def _write(self, name: str, line: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return FakeSlurm(folder)


def submit(client: Client, gpus: int, **fields: Any) -> None:
    client.submit({"name": "train", "command": ["true"], "gpus": {"min": gpus, "max": gpus}, **fields})


def test_jobs_that_a_pilot_cannot_start_are_not_counted(run: Run, fleet: InProcessService, slurm: FakeSlurm) -> None:
    with fleet.client() as client:
        client.create_queue({"name": "small", "limit_gpus": 2})
        submit(client, 4, queue="small")
        submit(client, 4, gpu="h100-80g")
        submit(client, 64)
    fleet.tick()
    assert run(*WATCH, "--submit").stdout == ""
    assert not slurm.scripts
    with fleet.client() as client:
        submit(client, 8)
    fleet.tick()
    give_up_at = time.monotonic() + 60.0
    while not slurm.scripts:  # the service may explain pending jobs from an earlier state for a while
        assert time.monotonic() < give_up_at
        run(*WATCH, "--submit")
    (script,) = slurm.scripts
    assert "--nodes=2" in script


def test_free_gpus_of_other_pools_count(run: Run, fleet: InProcessService, slurm: FakeSlurm) -> None:
    with fleet.client() as client:
        client.create_pool({"name": "reserve", "kind": "training"})
        for number in range(2):
            client.add_node({"name": f"r{number}", "pool": "reserve", "gpu": "a100-80g", "gpus": 4})
        submit(client, 16)
    fleet.tick()
    slurm.list_jobs(("7", "RUNNING", 1))
    assert run(*WATCH, "--submit").stdout == "", "12 GPUs are free, and 4 are coming"


def test_running_pilot_counts_until_its_nodes_have_joined(run: Run, fleet: InProcessService, slurm: FakeSlurm) -> None:
    with fleet.client() as client:
        submit(client, 8)
    fleet.tick()
    slurm.list_jobs(("7", "RUNNING", 1))
    assert run(*WATCH, "--submit").stdout == ""
    assert not slurm.scripts


def test_gpu_model_of_an_empty_pool_must_be_stated_for_jobs_that_require_one(
    run: Run, service: InProcessService, slurm: FakeSlurm
) -> None:
    with service.client() as client:
        client.create_pool({"name": "training", "kind": "training"})
        submit(client, 4, gpu="h100-80g")
        submit(client, 4, model="gpt2", globalBatch=8, steps=10)
    service.tick()
    service.tick()
    result = run(*WATCH)
    assert "4 GPUs: 1 more node" in result.stdout
    assert "--gpu" in result.stderr
    assert "8 GPUs: 2 more nodes" in run(*WATCH, "--gpu", "h100-80g").stdout
    assert "4 GPUs: 1 more node" in run(*WATCH, "--gpu", "a100-80g").stdout
    refused = run(*WATCH, "--gpu", "h100")
    assert (refused.exit_code, "h100-80g" in refused.stderr) == (ExitCode.USAGE, True)


def test_gpu_model_of_a_mixed_pool_must_be_stated(run: Run, fleet: InProcessService, slurm: FakeSlurm) -> None:
    with fleet.client() as client:
        client.add_node({"name": "t1", "pool": "training", "gpu": "h100-80g", "gpus": 4})
    fleet.tick()
    refused = run(*WATCH)
    assert (refused.exit_code, "--gpu" in refused.stderr) == (ExitCode.USAGE, True)
    assert run(*WATCH, "--gpu", "h100-80g").exit_code == 0


def test_pilot_joins_the_only_training_pool(run: Run, fleet: InProcessService, slurm: FakeSlurm) -> None:
    assert run("slurm", "submit", "--nodes", "2", *JOIN).exit_code == 0
    (script,) = slurm.scripts
    assert "--job-name=ebbtide-training" in script
    with fleet.client() as client:
        client.create_pool({"name": "reserve", "kind": "training"})
    refused = run("slurm", "submit", "--nodes", "2", *JOIN)
    assert (refused.exit_code, "reserve, training" in refused.stderr) == (ExitCode.USAGE, True)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((*JOIN, "--token-expires", "9d"), "--token-expires"),
        ((*JOIN, "--token-expires", "0s"), "--token-expires"),
        ((*JOIN, "--cpus-per-gpu", "4"), "--cpus-per-gpu"),
        ((*JOIN, "--gpus-per-node", "4", "--node-gpus", "4"), "--node-gpus"),
    ],
)
def test_dry_run_refuses_what_a_submission_refuses(run: Run, words: tuple[str, ...], option: str) -> None:
    refused = run("slurm", "submit", "--pool", "training", "--dry-run", *words)
    assert (refused.exit_code, f"{option}: " in refused.stderr) == (ExitCode.USAGE, True), refused.output


def test_loopback_address_in_the_script_is_warned_of_unless_it_is_stated_for_nodes(run: Run) -> None:
    submit = ("slurm", "submit", "--pool", "training", "--dry-run")
    result = run(*submit, "--url", "http://localhost:8787")
    assert ("--join http://localhost:8787" in result.stdout, "--join" in result.stderr) == (True, True)
    for silent in (("--join", "http://localhost:8787"), ("--url", "https://ebbtide.example")):
        assert run(*submit, *silent).stderr == ""


def test_nodes_without_managed_gpus_are_counted_by_their_stated_gpus(
    run: Run, fleet: InProcessService, slurm: FakeSlurm
) -> None:
    with fleet.client() as client:
        submit(client, 8)
    fleet.tick()
    watch = ("slurm", "watch", "--nodes-max", "8", "--once", "--submit", *JOIN)
    run(*watch, "--node-gpus", "8")
    (script,) = slurm.scripts
    assert ("--gpus 8" in script, "--gpus-per-node" in script) == (True, False)
    assert run(*watch).exit_code == ExitCode.USAGE
