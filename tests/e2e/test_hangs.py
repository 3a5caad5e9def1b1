"""Hung ranks on a machine with a node agent: real API, controller, agent, supervisors and ranks."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machine_site import MachineSite, open_site

RANK = Path(__file__).with_name("hanging_rank.py")
TIMEOUT_S = 3.0

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineSite]:
    with open_site(tmp_path_factory.mktemp("site"), disconnect_s=60.0) as opened:
        opened.join("m1", gpus=4)
        yield opened


def submit(site: MachineSite, mode: str, steps: int, *, gpus: int = 1, **fields: Any) -> str:
    script = site.shared / RANK.name
    shutil.copy(RANK, script)
    script.chmod(0o644)
    command = ["python3", str(script), mode, str(steps), str(site.shared)]
    return site.submit(mode, command, gpus=gpus, **{"hangTimeout": TIMEOUT_S, "venv": sys.prefix, **fields})


def read_hung_log(site: MachineSite, job_id: str) -> str:
    return "\n".join(line["text"] for line in site.client.logs(job_id, generation=1))


def has_failed_once(site: MachineSite, job_id: str) -> bool:
    return bool(site.client.job(job_id)["failure"])


@pytest.mark.parametrize(
    ("mode", "function"),
    [pytest.param("sleep", "wait_forever", marks=pytest.mark.full), ("spin", "spin_forever")],
)
def test_rank_that_stops_stepping_is_restarted_and_its_stack_is_in_the_log(
    site: MachineSite, record_property: Any, mode: str, function: str
) -> None:
    job_id = submit(site, mode, 10)
    site.wait(lambda: site.state(job_id) == "running")
    hung_at_s = time.monotonic()
    site.wait(lambda: has_failed_once(site, job_id))
    record_property("diagnosed_s", time.monotonic() - hung_at_s)
    job = site.client.job(job_id)
    failure = job["failure"]
    assert failure is not None
    assert failure["code"] == "hang"
    assert "rank 0 on node m1" in failure["reason"]
    assert "last step" in failure["reason"]
    assert f"in {function}" in failure["reason"]
    assert "hang" in str(site.client.explanation(job_id)["failure"])
    site.wait_for_success(job_id)
    assert site.client.job(job_id)["account"]["failures"] == 1
    site.wait(lambda: f"in {function}" in read_hung_log(site, job_id))


def test_rank_without_session_that_blocks_is_restarted(site: MachineSite) -> None:
    job_id = submit(site, "block", 0)
    site.wait(lambda: has_failed_once(site, job_id))
    failure = site.client.job(job_id)["failure"]
    assert failure is not None
    assert failure["code"] == "hang"
    site.wait_for_success(job_id)
    site.wait(lambda: "in wait_forever" in read_hung_log(site, job_id))


def test_busy_slow_and_exempt_ranks_are_left_alone(site: MachineSite) -> None:
    busy = submit(site, "compute", 8)
    slow = submit(site, "start", 8)
    exempt = submit(site, "sleep", 1, hangTimeout="never")
    for job_id in (busy, slow):
        site.wait_for_success(job_id)
        assert not has_failed_once(site, job_id)
    assert site.state(exempt) == "running"
    site.client.cancel(exempt)
