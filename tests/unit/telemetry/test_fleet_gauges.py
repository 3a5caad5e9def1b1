"""Gauges of the current cluster state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.fleet import DemandReading, Loan, LoanState, Node, NodeState, Pool, PoolKind
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.lending_policy import LendingMode, LendingPolicy
from scheduler.domain.machine import Machine
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.telemetry.fleet_gauges import NODE_STATES, FleetGauges

NODES = (
    Node("t0", "training", "cpu", 4, 1),
    Node("i0", "inference", "cpu", 2, 1),
    Node("i1", "inference", "cpu", 2, 1, inference_gpus=1),
    Node("i2", "inference", "cpu", 2, 1, state=NodeState.DOWN),
    Node("i3", "inference", "cpu", 2, 1, cordoned=True),
    Node("i4", "inference", "cpu", 2, 1, cordoned=True, draining=True),
)


def job(held: Allocation) -> Job:
    return Job("a", JobSpec("a", 1, 8), JobState.RUNNING, 0.0, 0.0, Progress(0.0), allocation=held)


def shown(snapshot: Snapshot, *, by_job: bool = False) -> dict[tuple[str, ...], float]:
    gauges = FleetGauges(snapshot, has_leader=False, inbox_size=3, by_job=by_job)
    return {
        (sample.name, *sample.labels.values()): sample.value for metric in gauges.collect() for sample in metric.samples
    }


def test_every_gpu_is_counted_once_by_its_use() -> None:
    held = Allocation(1, target={"t0": (0, 1), "i0": (0,)}, releasing={"t0": (2,)})
    snapshot = Snapshot(
        pools={
            name: Pool(name, kind)
            for name, kind in (("training", PoolKind.TRAINING), ("inference", PoolKind.INFERENCE))
        },
        nodes={node.name: node for node in NODES},
        jobs={"a": job(held)},
        loans={"i0": Loan("l1", "i0", "inference", LoanState.RECALLED, 0.0, 0.0, 60.0)},
    )
    gauges = shown(snapshot)
    assert gauges["ebbtide_gpus", "training", "training"] == 3
    assert gauges["ebbtide_gpus", "training", "idle"] == 1
    assert gauges["ebbtide_gpus", "inference", "training"] == 1
    assert gauges["ebbtide_lent_gpus", "inference"] == 2
    assert gauges["ebbtide_inference_supply_gpus", "inference"] == 2
    assert gauges["ebbtide_gpus", "inference", "inference"] == 1
    assert gauges["ebbtide_gpus", "inference", "down"] == 2
    assert gauges["ebbtide_gpus", "inference", "idle"] == 1 + 1 + 2 + 2
    in_all = sum(value for (name, *_), value in gauges.items() if name == "ebbtide_gpus")
    assert in_all == sum(node.gpus for node in NODES)


def test_queue_gpus_are_split_by_kind_and_undeclared_queues_share_a_series() -> None:
    held = Allocation(1, target={"t0": (0, 1), "i0": (0,)}, releasing={"t0": (2,)})
    named = {queue: replace(job(held), id=queue, spec=JobSpec("a", 1, 8, queue=queue)) for queue in ("lab", "x", "y")}
    pools = {"training": Pool("training", PoolKind.TRAINING), "inference": Pool("inference", PoolKind.INFERENCE)}
    nodes, queues = {node.name: node for node in NODES}, {name: JobQueue(name) for name in ("lab", "idle")}
    gauges = shown(Snapshot(pools=pools, nodes=nodes, jobs=named, queues=queues))
    assert {each[1:]: value for each, value in gauges.items() if each[0] == "ebbtide_queue_gpus"} == {
        ("lab", "own"): 3,
        ("lab", "lent"): 1,
        ("idle", "own"): 0,
        ("idle", "lent"): 0,
        ("", "own"): 6,
        ("", "lent"): 2,
    }


def test_queue_allocation_is_exported_with_its_guarantee_and_the_borrowed_part() -> None:
    sizes = {"lab": 4, "web": 2, "x": 1, "y": 3}
    jobs = {
        name: replace(
            job(Allocation(1, target={"t0": tuple(range(count))}, releasing={"i0": (0,)})),
            id=name,
            spec=JobSpec("a", 1, 8, queue=name),
        )
        for name, count in sizes.items()
    }
    queues = {"lab": JobQueue("lab", 3), "web": JobQueue("web", 6), "idle": JobQueue("idle", 1)}
    pools = {"training": Pool("training", PoolKind.TRAINING), "inference": Pool("inference", PoolKind.INFERENCE)}
    gauges = shown(Snapshot(pools=pools, nodes={node.name: node for node in NODES}, jobs=jobs, queues=queues))
    exported = {
        name: tuple(
            gauges.get((f"ebbtide_queue_{kind}_gpus", name)) for kind in ("guaranteed", "allocated", "borrowed")
        )
        for name in ("lab", "web", "idle", "")
    }
    assert exported == {"lab": (3, 4, 1), "web": (6, 2, 0), "idle": (1, 0, 0), "": (None, 4, 4)}


def test_nodes_are_counted_by_their_most_important_state() -> None:
    snapshot = Snapshot(
        pools={"inference": Pool("inference", PoolKind.INFERENCE)},
        nodes={node.name: node for node in NODES},
        loans={"i0": Loan("l1", "i0", "inference", LoanState.RECALLED, 0.0, 0.0, 60.0)},
    )
    gauges = shown(snapshot)
    for state in ("recalled", "up", "down", "cordoned", "draining"):
        assert gauges["ebbtide_nodes", "inference", state] == 1


def test_only_running_jobs_have_series_and_only_for_known_values() -> None:
    held = job(Allocation(1, target={"t0": (0,)}))
    runs = replace(held, progress=Progress(0.0, steps=12.0, loss=2.5, samples_per_s=30.0, peak_bytes=7_000))
    runs = replace(runs, progress=replace(runs.progress, is_reported=True))
    empty = Snapshot(pools={"training": Pool("training", PoolKind.TRAINING)}, nodes={"t0": NODES[0]})
    assert not [name for name, *_ in shown(replace(empty, jobs={"a": runs})) if name.startswith("ebbtide_job_")]
    gauges = shown(replace(empty, jobs={"a": runs}), by_job=True)
    exported = {name: gauges[f"ebbtide_job_{name}", "a"] for name in ("steps", "loss", "samples_per_s", "peak_bytes")}
    assert exported == {"steps": 12.0, "loss": 2.5, "samples_per_s": 30.0, "peak_bytes": 7_000}
    unknown = shown(replace(empty, jobs={"a": held}), by_job=True)
    assert not [name for name, *_ in unknown if name.startswith("ebbtide_job_")], "its steps are an estimate"
    queued = shown(replace(empty, jobs={"a": replace(runs, state=JobState.QUEUED)}), by_job=True)
    assert not [name for name, *_ in queued if name.startswith("ebbtide_job_")]


@pytest.mark.parametrize(
    ("enabled", "paused", "expected"),
    [(True, False, 1), (False, False, 0), (True, True, 0)],
    ids=["may", "off", "paused"],
)
def test_lending_enabled_gauge(enabled: bool, paused: bool, expected: int) -> None:
    pool = Pool("inference", PoolKind.INFERENCE, LendingPolicy(enabled=enabled))
    exported = shown(Snapshot(pools={"inference": pool}, switches=Switches(lending_paused=paused)))
    assert exported["ebbtide_lending_enabled", "inference"] == expected


def test_empty_cluster_exports_zeros_and_no_leader() -> None:
    gauges = shown(Snapshot())
    assert gauges["ebbtide_jobs", "running"] == 0
    assert gauges["ebbtide_loans", "active"] == 0
    assert gauges["ebbtide_leader",] == 0
    assert gauges["ebbtide_inbox_commands",] == 3


def test_demand_age_is_exported() -> None:
    snapshot = Snapshot(now_s=100.0, demand={"inference": DemandReading(40.0, 8.0, 8.0)})
    assert shown(snapshot)["ebbtide_demand_age_seconds", "inference"] == 60.0


def test_shadow_mode_shows_its_loans_and_is_not_enabled_lending() -> None:
    pool = Pool("inference", PoolKind.INFERENCE, LendingPolicy(mode=LendingMode.SHADOW))
    shadow = ShadowLending(0.0, ("i0",), gpus=2.0, settled_at_s=3600.0, settled_gpu_s=7200.0)
    found = shown(Snapshot(now_s=7200.0, pools={"inference": pool}, shadows={"inference": shadow}))
    assert found["ebbtide_shadow_gpus", "inference"] == 2.0
    assert found["ebbtide_shadow_gpu_hours", "inference"] == 4.0
    assert found["ebbtide_lending_enabled", "inference"] == 0.0


def test_each_node_exports_the_number_of_its_state() -> None:
    lent = {"i0": Loan("l1", "i0", "inference", LoanState.ACTIVE, 0.0, 0.0)}
    snapshot = Snapshot(
        pools={name: Pool(name, PoolKind.INFERENCE) for name in ("training", "inference")},
        nodes={node.name: node for node in NODES},
        loans=lent,
    )
    found = {
        key[2]: NODE_STATES[int(value)] for key, value in shown(snapshot).items() if key[0] == "ebbtide_node_state"
    }
    assert found == {"t0": "up", "i0": "active", "i1": "up", "i2": "down", "i3": "cordoned", "i4": "draining"}


@pytest.mark.parametrize(("age_s", "own_s", "is_lost"), [(3599.0, None, 0), (3600.0, None, 1), (3600.0, 7200.0, 0)])
def test_demand_is_lost_when_lending_recalls_all_loans(age_s: float, own_s: float | None, is_lost: int) -> None:
    pool = Pool("inference", PoolKind.INFERENCE, LendingPolicy(demand_lost_s=own_s))
    snapshot = Snapshot(now_s=age_s, pools={"inference": pool}, demand={"inference": DemandReading(0.0, 1.0, 1.0)})
    assert shown(snapshot)["ebbtide_demand_lost", "inference"] == is_lost


def test_machines_are_silent_after_the_time_in_which_their_ranks_end() -> None:
    seen = {"new": None, "well": 890.0, "silent": 879.0, "revoked": 0.0}
    machines = [
        Machine(
            *(name, (name,), "training", "cpu", "10.0.0.1", "0.1.0", 900.0),
            seen_at_s=at_s,
            revoked_at_s=1.0 if name == "revoked" else None,
        )
        for name, at_s in seen.items()
    ]
    gauges = FleetGauges(Snapshot(now_s=1000.0), has_leader=True, inbox_size=0, machines=machines, silent_after_s=120.0)
    found = {
        sample.labels["state"]: sample.value
        for metric in gauges.collect()
        for sample in metric.samples
        if sample.name == "ebbtide_machines"
    }
    assert found == {"reporting": 2, "silent": 1}
