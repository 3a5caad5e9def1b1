"""The comparison with no lending and no elasticity: started once, computed from recorded jobs, shown with its time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.domain.simulation_task import TaskState
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.seed_sweep import simulate_seeds
from scheduler.simulator.simulation_process import read_input_files, write_input_files
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import ApiService, Problem

PATH = "/v1/savings/comparison"


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[ApiService]:
    """A service whose jobs have used GPUs."""
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    service = ApiService(store=SqlStore(url))
    with service.http:
        service.made("/v1/pools", {"name": "training", "kind": "training"})
        service.made("/v1/nodes", {"name": "t0", "pool": "training", "gpu": "a100-80g", "gpus": 8})
        jobs = [service.submit(gpus={"min": 2, "max": 4}) for _ in range(3)]
        service.tick()
        service.clock.move_to(service.clock.now_s() + 1800.0)
        for job in jobs:
            service.http.delete(f"/v1/jobs/{job}")
        service.tick()
        yield service
    service.store.close()


def simulate(service: ApiService, simulation_id: str, folder: Path) -> None:
    """Act as the runner: simulate the stored files in this process."""
    store = service.store
    assert isinstance(store, SqlStore)
    claimed = store.simulations.claim("runner", now_s=service.clock.now_s(), until_s=1e12)
    files = store.simulations.get_files(simulation_id)
    assert claimed is not None
    assert files is not None
    write_input_files(files, folder)
    (report,) = simulate_seeds(read_input_files(folder), claimed.policies, (0,))
    store.simulations.finish(simulation_id, "runner", report.to_json(), now_s=service.clock.now_s())


def test_recorded_jobs_are_compared_under_three_policy_sets(recorded: ApiService, tmp_path: Path) -> None:
    assert recorded.get(PATH) == {"pending": None, "newest": None}
    started = recorded.post(PATH)
    assert (started.status_code, started.json()["state"]) == (202, "queued")
    assert recorded.post(PATH).json()["id"] == started.json()["id"], "one comparison at a time"
    assert recorded.get(PATH)["pending"]["progress"]["jobs_total"] == 9
    simulate(recorded, started.json()["id"], tmp_path)
    comparison = recorded.get(PATH)
    assert comparison["pending"] is None
    newest = comparison["newest"]
    assert newest["created_at_s"] - newest["from_s"] == 7 * 86_400.0
    assert [each["variant"] for each in newest["outcomes"]] == ["today", "no_lending", "no_elasticity"]
    assert all(each["completed"] == each["jobs"] == 3 for each in newest["outcomes"])
    assert all(each["jct_mean_s"] > 0.0 for each in newest["outcomes"])
    assert recorded.post(PATH).json()["id"] != newest["id"]
    assert recorded.get(PATH)["newest"] == newest, "results stay until newer ones exist"


def test_failed_comparison_keeps_the_newest_results(recorded: ApiService) -> None:
    started = recorded.post(PATH).json()["id"]
    store = recorded.store
    assert isinstance(store, SqlStore)
    store.simulations.claim("runner", now_s=recorded.clock.now_s(), until_s=1e12)
    store.simulations.fail(started, "runner", now_s=recorded.clock.now_s(), reason="it needs more memory", tries=1)
    comparison = recorded.get(PATH)
    assert (comparison["pending"]["state"], comparison["newest"]) == (TaskState.FAILED, None)
    assert comparison["pending"]["reason"] == "it needs more memory"


def test_comparison_needs_recorded_jobs(tmp_path: Path, problem: Problem) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    service = ApiService(store=SqlStore(url))
    with service.http:
        assert "training pool" in problem(service.post(PATH), 409)["detail"]
    service.store.close()


def test_variants_differ_from_the_policy_set_in_use_in_one_part_each() -> None:
    today, unlent, rigid = (load_policy_set(name) for name in ("ebbtide", "ebbtide-scaling", "ebbtide-loaning"))
    assert (unlent.scale, rigid.lend) == (today.scale, today.lend)
    assert unlent.lend is not today.lend
    assert rigid.scale is None
