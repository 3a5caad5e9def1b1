"""Policy sets that violate laws or raise errors are reported, and legal decisions still apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import JobRow
from scheduler.domain.gpu_sets import FreeGpus, Gpus
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policy_sets import PolicySet, load_policy_set
from scheduler.simulator import engine
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.simulate import PolicyError, simulate

CLUSTER = ClusterDocument.model_validate(
    {"pools": [{"name": "training", "kind": "training", "nodes": 1, "gpus_per_node": 8, "gpu": "a100-80g"}]}
)
JOBS = [JobRow(line=at, job_id=f"j{at}", submit_time_s=0.0, duration_s=100.0, gpus=2) for at in (2, 3)]


def place_on_first_gpus(snapshot: Snapshot, rooms: Sequence[FreeGpus], job: Job, count: int) -> Gpus:
    return {rooms[0].node: tuple(range(count))}


def place_one_too_many(snapshot: Snapshot, rooms: Sequence[FreeGpus], job: Job, count: int) -> Gpus:
    return {rooms[0].node: tuple(rooms[0].indices[: count + 1])}


def raise_key_error(snapshot: Snapshot, settings: object) -> tuple[str, ...]:
    raise KeyError("a table of mine")


def simulate_policy(**functions: Any) -> PolicyReport:
    mine: PolicySet = replace(load_policy_set("fifo"), name="mine", **functions)
    (report,) = simulate(JOBS, [], CLUSTER, mine, seed=0).policies
    return report


def test_second_decision_for_the_same_gpu_is_dropped_and_described() -> None:
    report = simulate_policy(place=place_on_first_gpus)
    assert (report.completed, report.makespan_s) == (2, 200.0), "one after the other"
    assert report.violations == 2, "at the arrival, and at one full pass before the first job ends"
    (violation,) = report.violated
    for part in ("gpu-held-twice", "2 decisions", "0 s", "j3", "GPU 0 of training-0"):
        assert part in violation


def test_decision_above_the_maximum_of_a_job_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "STALL_LIMIT_S", 3600.0)
    report = simulate_policy(place=place_one_too_many)
    assert report.completed == 0
    assert report.violations
    assert "gpus-out-of-range: " in report.violated[0]
    assert "j2: 3 GPUs" in report.violated[0]


def test_policy_error_names_policy_time_and_line() -> None:
    with pytest.raises(PolicyError, match=r"policy mine failed at 0 s: KeyError: 'a table of mine' \(test_policy_e"):
        simulate_policy(order=raise_key_error)


def test_correct_policy_has_no_violations() -> None:
    report = simulate_policy()
    assert (report.completed, report.violations, report.violated) == (2, 0, ())
