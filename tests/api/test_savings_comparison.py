"""The comparison with no lending and no elasticity: started once, computed from recorded jobs, shown with its time."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.domain.savings_comparison import (
    DAY_S,
    POLICY_BY_VARIANT,
    RECORDED_S,
    ComparedOutcome,
    ComparisonState,
    DailyComparison,
    Variant,
    find_day,
)
from scheduler.domain.simulation_task import TaskState
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.seed_sweep import simulate_seeds
from scheduler.simulator.simulation_process import read_input_files, write_input_files
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import ApiService, Problem

PATH = "/v1/savings/comparison"
OUTCOME_NUMBERS = (
    *("jct_mean_s", "jct_p95_s", "waiting_mean_s", "makespan_s"),
    *("loaned_gpu_hours", "idle_waiting_gpu_hours", "lost_gpu_hours", "short_ratio"),
)


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


def test_days_are_listed_with_their_states_and_gaps(recorded: ApiService, problem: Problem) -> None:
    path = f"{PATH}/days"
    assert recorded.get(path) == {"is_enabled": True, "items": []}
    store = recorded.store
    assert isinstance(store, SqlStore)
    lease = store.get_lease()
    assert lease is not None
    today_s = find_day(recorded.clock.now_s())
    numbers = dict.fromkeys(OUTCOME_NUMBERS, 1.0)
    outcomes = tuple(
        ComparedOutcome(variant=variant, policy=policy, jobs=3, completed=3, **numbers)
        for variant, policy in POLICY_BY_VARIANT.items()
    )
    for days_ago, state, found in ((3, ComparisonState.SUCCEEDED, outcomes), (1, ComparisonState.FAILED, ())):
        day_s = today_s - days_ago * DAY_S
        reason = "" if found else "out of memory"
        comparison = DailyComparison(day_s, day_s + 600.0, state, f"sim-{days_ago}", reason, day_s + 900.0, (), found)
        store.comparisons.put(comparison, epoch=lease.epoch)
    items = recorded.get(path)["items"]
    assert [(item["day"] - today_s) // DAY_S for item in items] == [-3, -2, -1]
    assert [item["state"] for item in items] == ["succeeded", "missing", "failed"]
    assert [len(item["outcomes"]) for item in items] == [3, 0, 0]
    assert items[0]["to_s"] - items[0]["from_s"] == RECORDED_S
    assert (items[1]["from_s"], bool(items[1]["reason"]), items[2]["reason"]) == (None, True, "out of memory")
    rows = list(csv.DictReader(io.StringIO(recorded.http.get(f"{path}?format=csv").text)))
    assert [(row["state"], row["variant"], row["jct_mean_s"]) for row in rows] == [
        *(("succeeded", variant.value, "1") for variant in Variant), ("missing", "", ""), ("failed", "", ""),
    ]  # fmt: skip
    assert len(recorded.get(path, **{"from": today_s - 2 * DAY_S})["items"]) == 1
    assert problem(recorded.http.get(f"{path}?from=soon"), 422)["errors"][0]["field"].endswith("from")
