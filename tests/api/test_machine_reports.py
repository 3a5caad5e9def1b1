"""Orders that a machine gets in reply to its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.observation import Run, RunPhase
from tests.api.test_machine_logs import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def report(site: Site, **run: Any) -> dict[str, Any]:
    """Report one run of the job, and return the order for it."""
    (node,) = site.service.store.load().snapshot.jobs[site.job].allocation.target
    answer = site.service.http.post(
        "/v1/machines/m0/report",
        json={"runs": [{"job_id": site.job, "node": node, "generation": 0, **run}]},
        headers={"Authorization": f"Bearer {site.credentials['m0']}"},
    )
    assert answer.status_code == 200, answer.text
    (order,) = (order for order in answer.json()["runs"] if order["node"] == node)
    return dict(order)


def pass_time(site: Site) -> None:
    """Let what the service has cached become too old."""
    site.service.clock.move_to(site.service.clock.now_s() + 1.0)


def test_logs_of_a_run_are_claimed_before_its_ranks_start(site: Site) -> None:
    """A short job may have ended, and its record may be deleted, before the machine can send its first output."""
    assert report(site, prepared=site.generation)["begin"] == {"host": "127.0.0.1", "port": 29500}
    site.service.run_log.delete_runs(site.job, up_to_generation=site.generation, epoch=1)
    pass_time(site)
    assert site.end(b"late\n", complete=True) == 5


def test_run_is_begun_although_its_logs_cannot_be_claimed(site: Site, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("not a folder")
    assert report(site, prepared=site.generation)["begin"] is not None


def test_run_that_has_ended_is_not_prepared_again(site: Site) -> None:
    """The machine forgets a recorded end at once, the snapshot has the allocation until the next tick."""
    assert report(site)["document"] is not None
    run = Run(site.job, site.generation, RunPhase.SUCCEEDED)
    site.service.run_log.record_end(run, epoch=1)
    pass_time(site)
    assert report(site)["document"] is None


def test_nothing_begins_beside_ranks_that_the_database_does_not_know(site: Site) -> None:
    """After a restore, they may hold the GPUs that the database believes to be free."""
    (node,) = site.service.store.load().snapshot.jobs[site.job].allocation.target
    stranger = {"job_id": "later", "node": node, "generation": 1, "ranks": [{"rank": 0}]}
    wanted = {"job_id": site.job, "node": node, "generation": 0, "prepared": site.generation}
    for runs, begins in (([stranger, wanted], False), ([wanted], True)):
        answer = site.service.http.post(
            "/v1/machines/m0/report",
            json={"runs": runs},
            headers={"Authorization": f"Bearer {site.credentials['m0']}"},
        )
        orders = {order["job_id"]: order for order in answer.json()["runs"]}
        assert (orders[site.job]["begin"] is not None) == begins
    assert not orders.get("later")
