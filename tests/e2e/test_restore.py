"""A restore from an older backup while agents run newer generations: real API, controller, agent and ranks."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from scheduler.store.backup import restore_backup, write_backup
from scheduler.store.schema_migration import GENERATION_LEAP
from tests.e2e import machine_site
from tests.e2e.machine_site import MachineSite, open_site

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]

PATIENCE_S = 180.0
PROGRAM = """
import os, sys, time
started = time.time()
path = f"{sys.argv[1]}/{sys.argv[2]}-{started}"
while True:
    with open(path + ".new", "w") as file:
        file.write(str(time.time()))
    os.replace(path + ".new", path)
    time.sleep(0.02)
"""


def submit(site: MachineSite, name: str) -> str:
    """Submit a job whose rank writes a file named after its start, with the time at which it was last alive."""
    job_id = site.submit(name, ["python3", "-c", PROGRAM, str(site.shared), name], gpus=1)
    site.wait(lambda: site.state(job_id) == "running" and bool(list_lives(site, name)))
    return job_id


def list_lives(site: MachineSite, name: str) -> list[tuple[float, float]]:
    """Return the first and the last time at which each rank of the job was alive, oldest first."""
    files = [file for file in site.shared.glob(f"{name}-*") if not file.name.endswith(".new")]
    return sorted((float(file.name.rpartition("-")[2]), float(file.read_text())) for file in files)


def restart(site: MachineSite, backup: Path) -> None:
    for name in ("api", "controller"):
        site.stop(name, signal.SIGTERM)
    restore_backup(backup, site.database_url, now_s=time.time(), is_forced=True)
    for name in ("api", "controller"):
        site.start(name, name)
    site.wait(site.client.is_ready)


@pytest.mark.full
def test_restore_keeps_known_runs_and_never_runs_a_job_or_a_gpu_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_site, "TIMEOUT_S", PATIENCE_S)
    with open_site(tmp_path, disconnect_s=PATIENCE_S) as site:
        site.join("m1", gpus=3)
        steady, moved = submit(site, "steady"), submit(site, "moved")
        backup = tmp_path / "backup"
        write_backup(site.database_url, backup, files={}, now_s=time.time())
        site.client.suspend(moved)
        site.wait(lambda: site.state(moved) == "suspended")
        later = submit(site, "later")
        site.client.resume(moved)
        site.wait(lambda: len(list_lives(site, "moved")) == 2)
        restart(site, backup)
        waiting = site.submit("waiting", ["python3", "-c", PROGRAM, str(site.shared), "waiting"], gpus=1)
        site.wait(lambda: len(list_lives(site, "moved")) == 3 and site.state(moved) == "running")
        site.wait(lambda: site.state(waiting) == "running" and bool(list_lives(site, "waiting")))
        assert site.state(steady) == "running"
        [(_, steady_alive_s)] = list_lives(site, "steady")
        assert time.time() - steady_alive_s < 5.0
        [(_, later_end_s)], (_, moved_second, moved_third) = list_lives(site, "later"), list_lives(site, "moved")
        [(waiting_start_s, _)] = list_lives(site, "waiting")
        assert moved_second[1] < moved_third[0]
        assert later_end_s < waiting_start_s
        assert site.client.job(moved)["generation"] > GENERATION_LEAP
        assert later not in {job["id"] for job in site.client.jobs()}
        assert site.client.job(moved)["account"]["failures"] == 0
