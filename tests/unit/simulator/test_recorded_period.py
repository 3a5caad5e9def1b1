"""Input files that replay what a service recorded: valid files, unlike nodes, gaps in demand, and missing profiles."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.simulator.recorded_period import DEMAND_STEP_S, RecordedPeriod, build_recorded_period
from scheduler.simulator.simulation_process import validate_input_files
from tests.builders import a_fleet, a_job, a_snapshot

POLICIES = ["ebbtide", "ebbtide-scaling", "ebbtide-loaning"]
DAY_S = 86_400.0
NOW_S = 10 * DAY_S


def ended(job_id: str, at_s: float, *, gpu_s: float = 7200.0, **more: Any) -> Job:
    job = a_job(job_id, 2, 8, state=JobState.SUCCEEDED, now_s=at_s, **more)
    account = JobAccount(gpu_s=gpu_s, first_started_at_s=at_s, settled_at_s=at_s + 1800.0)
    return replace(job, account=account, state_since_s=at_s + 1800.0)


def fleet() -> Snapshot:
    lending = LendingPolicy(headroom=0.05, return_deadline_s=240.0)
    snapshot = a_snapshot(a_fleet(training=3, inference=4, lending=lending), [])
    return replace(snapshot, now_s=NOW_S, queues={"default": JobQueue("default", guaranteed_gpus=8)})


def build(snapshot: Snapshot, jobs: list[Job], readings: list[DemandReading]) -> RecordedPeriod:
    return build_recorded_period(snapshot, jobs, {"inference": readings}, from_s=NOW_S - DAY_S, to_s=NOW_S)


def test_files_are_valid_and_have_the_jobs_of_the_period() -> None:
    jobs = [ended("old", NOW_S - 2 * DAY_S), *(ended(f"j{at}", NOW_S - 3600.0 * (at + 1)) for at in range(3))]
    period = build(fleet(), jobs, [DemandReading(NOW_S - DAY_S, 12.0, 12.0)])
    assert period.jobs == 3
    assert validate_input_files(period.files, POLICIES) == 3
    assert period.differences == ()
    cluster = json.loads(period.files.cluster)
    assert [(pool["name"], pool["nodes"], pool["gpus_per_node"]) for pool in cluster["pools"]] == [
        ("inference", 4, 8),
        ("training", 3, 8),
    ]
    assert cluster["pools"][0]["lending"]["return_deadline_s"] == 240.0
    assert cluster["queues"][0]["guaranteed_gpus"] == 8


def test_job_that_still_runs_has_the_work_that_it_did() -> None:
    job = a_job("long", 2, 8, state=JobState.RUNNING, on={"t0": (0, 1)}, now_s=NOW_S - 3600.0, steps=10**9)
    running = replace(job, account=JobAccount(first_started_at_s=NOW_S - 3600.0, settled_at_s=NOW_S - 3600.0))
    (row,) = csv.DictReader(io.StringIO(build(fleet(), [running], []).files.jobs))
    assert (row["gpus"], float(row["duration_s"])) == ("2", 3600.0)


def test_demand_is_a_step_function_without_gaps() -> None:
    readings = [DemandReading(NOW_S - DAY_S / 2, 5.0, 5.0), DemandReading(NOW_S - 100.0, 9.0, 9.5)]
    period = build(fleet(), [ended("j", NOW_S - 4000.0)], readings)
    rows = [line.split(",") for line in period.files.demand.splitlines()[1:]]
    times_s = [float(row[0]) for row in rows]
    assert len(rows) == int(DAY_S / DEMAND_STEP_S)
    assert {later - earlier for earlier, later in pairwise(times_s)} == {DEMAND_STEP_S}
    assert {row[2] for row in rows} == {"5"}, "the first reading holds before it, and the last one came too late"


def test_what_cannot_be_replayed_is_named() -> None:
    snapshot = fleet()
    small = replace(snapshot.nodes["t0"], gpus=4)
    snapshot = replace(snapshot, nodes={**snapshot.nodes, "t0": small})
    unknown = ended("unknown", NOW_S - 5000.0, gpu="v100-16g")
    period = build(snapshot, [ended("j", NOW_S - 4000.0), unknown], [])
    assert period.jobs == 1
    assert [name in text for name, text in zip(("inference", "training", "1 of 2"), period.differences, strict=True)]
    assert validate_input_files(period.files, POLICIES) == 1
    training = json.loads(period.files.cluster)["pools"][1]
    assert (training["nodes"], training["gpus_per_node"]) == (2, 8)
    assert period.files.demand.splitlines()[1].endswith(",32"), "a pool without readings needs all its GPUs"


def test_parts_of_nodes_are_replayed() -> None:
    snapshot = fleet()
    parts = {"i0": (6, 7), "i1": (0, 1), "i2": (7,)}
    lending = {name: replace(snapshot.nodes[name], lendable_gpus=indices) for name, indices in parts.items()}
    snapshot = replace(snapshot, nodes={**snapshot.nodes, **lending})
    period = build(snapshot, [ended("j", NOW_S - 4000.0)], [DemandReading(NOW_S - DAY_S, 1.0, 1.0)])
    inference = json.loads(period.files.cluster)["pools"][0]
    assert (inference["lendable_gpus"], inference["partial_nodes"]) == (2, 3)
    assert len(period.differences) == 1
    assert validate_input_files(period.files, POLICIES) == 1


def test_model_that_only_the_service_knows_is_replayed_without_its_curve() -> None:
    job = ended("j", NOW_S - 4000.0, model="my-own-model", global_batch=8)
    period = build(fleet(), [job], [DemandReading(NOW_S - DAY_S, 1.0, 1.0)])
    assert "my-own-model" not in period.files.jobs
    assert validate_input_files(period.files, POLICIES) == 1


@pytest.mark.parametrize("is_empty", [True, False])
def test_nothing_to_simulate_is_an_error(is_empty: bool) -> None:
    snapshot = fleet()
    if is_empty:
        snapshot = replace(snapshot, nodes={name: node for name, node in snapshot.nodes.items() if name[0] == "i"})
    jobs = [ended("j", NOW_S - 4000.0)] if is_empty else [ended("idle", NOW_S - 4000.0, gpu_s=0.0)]
    with pytest.raises(ValueError, match="training pool" if is_empty else "no job"):
        build(snapshot, jobs, [])
