"""A machine with a GPU joins a pool, and its agent runs contained jobs on it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from scheduler.agent.gpu_use import read_busy_share
from scheduler.agent.inventory import InventoryOverrides, detect_inventory
from tests.e2e.machine_site import MachineSite, open_site

NAME = "gpu-machine"
PROGRAM = Path(__file__).with_name("gpu_program.py")

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineSite]:
    with open_site(tmp_path_factory.mktemp("site")) as opened:
        token = opened.folder / "token"
        token.write_text(opened.client.create_join_token("training")["secret"])
        join = ("--join", f"http://127.0.0.1:{opened.port}", "--token-file", str(token), "--name", NAME)
        opened.start(NAME, *opened.agent_arguments(NAME), *join, "--address", "127.0.0.1")
        opened.wait(lambda: any(node["state"] == "up" for node in opened.client.nodes()))
        yield opened


def submit(site: MachineSite, name: str, seconds: float, *words: str) -> tuple[str, Path]:
    program = site.shared / PROGRAM.name
    shutil.copy(PROGRAM, program)
    program.chmod(0o644)
    record = site.shared / f"{name}.json"
    return site.submit(name, [*words, sys.executable, str(program), str(record), str(seconds)], gpus=1), record


def read_record(site: MachineSite, job_id: str, record: Path) -> dict[str, Any]:
    site.wait(lambda: record.exists() or site.state(job_id) == "failed")
    assert record.exists(), [line["text"] for line in site.client.logs(job_id, rank=0)]
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def list_gpu_processes() -> set[int]:
    """Return the processes that hold memory of the GPU."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()


def read_used_bytes() -> int:
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


def test_inventory_is_what_the_driver_reports(site: MachineSite) -> None:
    [gpu] = detect_inventory(InventoryOverrides()).gpus
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert gpu.uuid == pynvml.nvmlDeviceGetUUID(handle)
    assert gpu.memory_bytes == pynvml.nvmlDeviceGetMemoryInfo(handle).total
    pynvml.nvmlShutdown()
    assert gpu.cores > 0
    assert gpu.clock_hz > 10**9
    assert gpu.memory_bus_bits > 0
    assert gpu.minor is not None
    assert Path(f"/dev/nvidia{gpu.minor}").exists()
    machine = site.client.machine(NAME)
    assert machine["gpus"] == 1
    assert machine["containment"].startswith(("full", "partial")), machine["containment"]
    print(json.dumps(machine, indent=1))


def test_job_computes_on_its_gpu_by_uuid_as_another_user(site: MachineSite) -> None:
    job_id, record = submit(site, "compute", 1.0)
    found = read_record(site, job_id, record)
    [gpu] = detect_inventory(InventoryOverrides()).gpus
    assert found["visible"] == gpu.uuid
    assert found["devices"] == 1
    assert found["uuid"] in gpu.uuid
    assert found["product"] == 1.0
    assert found["uid"] != 0
    site.wait_for_success(job_id)


def test_use_is_seen_and_a_cancelled_job_leaves_nothing_on_the_gpu(site: MachineSite) -> None:
    [gpu] = detect_inventory(InventoryOverrides()).gpus
    before = list_gpu_processes()
    used_bytes = read_used_bytes()
    job_id, record = submit(site, "escapes", 600.0, "setsid", "--wait")
    read_record(site, job_id, record)
    site.wait(lambda: read_busy_share([gpu.uuid]) > 0.5)
    site.client.cancel(job_id)
    site.wait(lambda: site.state(job_id) == "cancelled")
    site.wait(lambda: not site.client.job(job_id)["releasing_nodes"])
    site.wait(lambda: {pid for pid in list_gpu_processes() - before if psutil.pid_exists(pid)} == set())
    assert read_used_bytes() <= used_bytes + 2**27
