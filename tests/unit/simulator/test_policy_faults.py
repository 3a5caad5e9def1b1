"""A policy set that breaks laws, or raises, is caught and named; what is legal goes on."""

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
from scheduler.scheduling.policies.policy_set import PolicySet, load_policy_set
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.simulate import PolicyError, simulate

CLUSTER = ClusterDocument.model_validate(
    {"pools": [{"name": "training", "kind": "training", "nodes": 1, "gpus_per_node": 8, "gpu": "a100-80g"}]}
)
JOBS = [JobRow(line=at, job_id=f"j{at}", submit_time_s=0.0, duration_s=100.0, gpus=2) for at in (2, 3)]


def always_on_the_first(snapshot: Snapshot, rooms: Sequence[FreeGpus], job: Job, count: int) -> Gpus:
    return {rooms[0].node: tuple(range(count))}


def one_too_many(snapshot: Snapshot, rooms: Sequence[FreeGpus], job: Job, count: int) -> Gpus:
    return {rooms[0].node: tuple(rooms[0].indices[: count + 1])}


def out_of_order(snapshot: Snapshot, settings: object) -> tuple[str, ...]:
    raise KeyError("a table of mine")


def played(**questions: Any) -> PolicyReport:
    mine: PolicySet = replace(load_policy_set("fifo"), name="mine", **questions)
    (report,) = simulate(JOBS, [], CLUSTER, mine, seed=0).policies
    return report


def test_a_gpu_that_is_given_twice_is_given_once_and_the_second_decision_named() -> None:
    report = played(place=always_on_the_first)
    assert (report.completed, report.makespan_s) == (2, 200.0), "one after the other"
    assert report.violations == 2, "at the arrival, and at one full pass before the first job ends"
    (told,) = report.violated
    assert told == "gpu-held-twice: 2 dropped, first at 0 s that of j3: GPU 0 of training-0 is held by j2"


def test_more_gpus_than_a_job_s_maximum_are_not_given() -> None:
    report = played(place=one_too_many)
    assert report.completed == 0
    assert report.violations
    assert "gpus-out-of-range: " in report.violated[0]
    assert "j2: 3 GPUs are outside 2 to 2" in report.violated[0]


def test_an_error_of_a_policy_names_the_policy_the_time_and_the_line() -> None:
    with pytest.raises(PolicyError, match=r"policy mine failed at 0 s: KeyError: 'a table of mine' \(test_policy_f"):
        played(order=out_of_order)


def test_a_policy_without_a_mistake_is_accused_of_nothing() -> None:
    report = played()
    assert (report.completed, report.violations, report.violated) == (2, 0, ())
