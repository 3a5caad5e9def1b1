"""Runs observed from pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.host_ports import compute_port_requests
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import FailureCause, NodeFacts, Observation, ReplicaStart, Run, RunPhase
from scheduler.domain.placement_record import PodRefusal
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.cluster_observation import (
    START_TIMEOUT_S,
    StartObstacles,
    find_agent_ends,
    find_live_agents,
    find_overcommitted_nodes,
    merge_pod_runs,
    observe_nodes,
)
from scheduler.kubernetes.node_capacities import find_shortages
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_view import PodView, parse_pod_view
from scheduler.kubernetes.resources.elastic_job_status import build_job_status
from scheduler.kubernetes.resources.meta import PODS_STARTED
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.builders import a_fleet, a_job, a_snapshot

NOW_S = 100.0
POOLS, NODES = a_fleet(training=2, inference=0)


def starting(target: Gpus, *, generation: int = 1, releasing: Gpus | None = None) -> Job:
    job = a_job("a", 1, 16, state=JobState.STARTING, on=target, releasing=releasing, now_s=NOW_S)
    return replace(job, allocation=replace(job.allocation, generation=generation))


def pod(node: str, gpus: int, *, bound: bool = True, generation: int = 1, phase: str = "Pending") -> PodView:
    name = f"a-g{generation}-{node}"
    created = PodView("jobs", name, f"uid-{name}", node if bound else "", gpus, phase, False)
    return replace(created, job_id="a", target_node=node, generation=generation)


def test_generation_is_starting_while_its_pods_start() -> None:
    job = starting({"t0": (0, 1), "t1": (0,)})
    pods = [pod("t0", 2), pod("t1", 1, bound=False)]
    assert merge_pod_runs(job, (), pods, NOW_S) == (Run("a", 1, RunPhase.STARTING, {"t0": (0, 1)}),)


def test_pod_rejected_by_its_node_is_lost() -> None:
    refused = replace(pod("t0", 2, phase="Failed"), reason="OutOfnvidia.com/gpu")
    (run,) = merge_pod_runs(starting({"t0": (0, 1)}), (), [refused], NOW_S)
    assert run.phase is RunPhase.LOST
    assert "OutOfnvidia.com/gpu" in run.reason


def test_pod_that_exited_has_failed() -> None:
    ended = replace(pod("t0", 2, phase="Failed"), error="Error: no module named train", exit_code=1)
    (run,) = merge_pod_runs(starting({"t0": (0, 1)}), (), [ended], NOW_S)
    assert run.phase is RunPhase.FAILED
    assert run.reason.startswith("pod jobs/a-g1-t0 on t0 ")
    assert run.reason.endswith(": Error: no module named train, exit code 1")


def test_image_pull_error_fails_after_a_timeout() -> None:
    waiting = replace(pod("t0", 2), error="ImagePullBackOff: no such image")
    job = starting({"t0": (0, 1)})
    assert [run.phase for run in merge_pod_runs(job, (), [waiting], NOW_S + START_TIMEOUT_S - 1)] == [RunPhase.STARTING]
    (run,) = merge_pod_runs(job, (), [waiting], NOW_S + START_TIMEOUT_S)
    assert run.phase is RunPhase.LOST
    assert run.refusal == PodRefusal("t0", "ImagePullBackOff", "no such image")


def test_missing_secret_is_reported_at_once_and_fails_after_a_timeout() -> None:
    waiting = replace(pod("t0", 2), error='CreateContainerConfigError: secret "keys" not found')
    job = starting({"t0": (0, 1)})
    (at_once,) = merge_pod_runs(job, (), [waiting], NOW_S)
    assert at_once.phase is RunPhase.STARTING
    assert 'secret "keys" not found' in at_once.reason
    facts = {name: NodeFacts() for name in NODES}
    snapshot = a_snapshot((POOLS, NODES), [job], now_s=NOW_S)
    told = update_snapshot(snapshot, Observation(NOW_S, 0, (at_once,), facts), ()).snapshot.jobs["a"]
    assert (told.state, told.message) == (JobState.STARTING, at_once.reason)
    status = build_job_status(told, None, snapshot, before={}, accepted=())
    assert any(each.type == PODS_STARTED and each.message == at_once.reason for each in status["conditions"])
    (failed,) = merge_pod_runs(job, (), [waiting], NOW_S + START_TIMEOUT_S)
    assert failed.phase is RunPhase.FAILED


def test_rejected_pod_is_a_refusal_by_its_node() -> None:
    rejected = replace(
        pod("t0", 2, phase="Failed"), is_rejected=True, reason="OutOfcpu", error="OutOfcpu: Pod was rejected: no cpu"
    )
    (run,) = merge_pod_runs(starting({"t0": (0, 1)}), (), [rejected], NOW_S)
    assert run.refusal == PodRefusal("t0", "OutOfcpu", "Pod was rejected: no cpu")


@pytest.mark.parametrize(
    ("reason", "message", "is_rejected"),
    [
        ("Evicted", "Pod was rejected: The node had condition: [DiskPressure]. ", True),
        ("Evicted", "The node was low on resource: ephemeral-storage.", False),
        ("OutOfcpu", "Pod was rejected: Node didn't have enough resource: cpu", True),
        ("Shutdown", "Pod was terminated in response to imminent node shutdown.", False),
    ],
)
def test_rejection_by_a_node_is_told_from_the_end_of_an_admitted_pod(
    reason: str, message: str, is_rejected: bool
) -> None:
    status = {"phase": "Failed", "reason": reason, "message": message}
    assert parse_pod_view({"metadata": {"name": "a"}, "status": status}).is_rejected is is_rejected


def test_pod_whose_volumes_do_not_arrive_is_a_refusal_after_a_timeout() -> None:
    unprepared, job = replace(pod("t0", 2), is_prepared=False), starting({"t0": (0, 1)})
    (before,) = merge_pod_runs(job, (), [unprepared], NOW_S + START_TIMEOUT_S - 1)
    (after,) = merge_pod_runs(job, (), [unprepared], NOW_S + START_TIMEOUT_S)
    assert before.refusal is None
    assert after.refusal is not None
    assert after.refusal.reason == "VolumesNotReady"


def test_cause_of_missing_volumes_is_reported_at_once_and_with_the_refusal() -> None:
    unprepared, job = replace(pod("t0", 2), is_prepared=False), starting({"t0": (0, 1)})
    lost = 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'
    obstacles = StartObstacles(setup_errors={unprepared.uid: f"FailedMount: {lost}"}, timeout_s=600.0)
    (before,) = merge_pod_runs(job, (), [unprepared], NOW_S + 599.0, obstacles=obstacles)
    assert before.phase is RunPhase.STARTING
    assert before.reason.endswith(f"cannot start: FailedMount: {lost}")
    (after,) = merge_pod_runs(job, (), [unprepared], NOW_S + 600.0, obstacles=obstacles)
    assert after.refusal == PodRefusal("t0", "FailedMount", lost)
    (ready,) = merge_pod_runs(job, (), [replace(unprepared, is_prepared=True)], NOW_S + 599.0, obstacles=obstacles)
    assert not ready.reason


def test_unbound_pod_without_resources_on_its_node_is_a_refusal() -> None:
    shortage = PodRefusal("t0", "OutOfcpu", "too little")
    waiting = pod("t0", 2, bound=False)
    (run,) = merge_pod_runs(
        starting({"t0": (0, 1)}), (), [waiting], NOW_S, obstacles=StartObstacles(shortages={"t0": shortage})
    )
    assert run.refusal == shortage


def test_unbound_pod_whose_host_port_a_foreign_pod_uses_is_a_refusal() -> None:
    requests = tuple(compute_port_requests({"containers": [{"ports": [{"hostPort": 8080}]}]}).items())
    waiting = replace(pod("t0", 2, bound=False), requests=requests)
    foreign = replace(pod("t0", 0), name="foreign", job_id="", requests=requests)
    node = NodeView("t0", "1", True, False, 8, allocatable=())
    desired = a_snapshot((POOLS, NODES), [starting({"t0": (0, 1)})])
    assert not find_shortages(desired, ClusterView(pods=(waiting,), nodes={"t0": node}))
    found = find_shortages(desired, ClusterView(pods=(waiting, foreign), nodes={"t0": node}))
    assert (found["t0"].reason, "8080/TCP" in found["t0"].message) == ("NodePorts", True)


def test_leaving_pod_holds_its_gpus_until_it_is_gone() -> None:
    job = starting({"t1": (0, 1)}, generation=2, releasing={"t0": (0, 1)})
    left = Run("a", 1, RunPhase.LEFT)
    leaving, coming = pod("t0", 2, phase="Running"), pod("t1", 2, generation=2, bound=False)
    reported = merge_pod_runs(job, (left,), [leaving, coming], NOW_S)
    assert reported[0] == replace(left, gpus={"t0": (0, 1)})
    assert merge_pod_runs(job, (left,), [coming], NOW_S)[0] == left


def test_gpus_of_a_leaving_pod_count_for_one_generation() -> None:
    job = starting({"t0": (0,)}, generation=3, releasing={"t1": (0,)})
    left, leaves = Run("a", 1, RunPhase.LEFT), Run("a", 2, RunPhase.LEAVING, {"t0": (0,), "t1": (0,)})
    pods = [pod("t0", 1, phase="Running"), pod("t1", 1, generation=2, phase="Running")]
    reported = merge_pod_runs(job, (left, leaves), pods, NOW_S)
    assert reported == (left, leaves, Run("a", 3, RunPhase.STARTING))


def test_pods_of_an_unstarted_generation_hold_their_gpus() -> None:
    job = replace(starting({}, generation=2, releasing={"t0": (0, 1)}), state=JobState.PREEMPTED)
    (run,) = merge_pod_runs(job, (), [pod("t0", 2)], NOW_S)
    assert (run.generation, run.gpus) == (1, {"t0": (0, 1)})


def test_pending_generation_excludes_gpus_of_the_running_one() -> None:
    job = starting({"t0": (0,), "t1": (0,)}, generation=2)
    works = Run("a", 1, RunPhase.RUNNING, {"t0": (0,)})
    stays, comes = pod("t0", 1, phase="Running"), pod("t1", 1, generation=2)
    reported = merge_pod_runs(job, (works,), [stays, comes], NOW_S)
    assert reported == (works, Run("a", 2, RunPhase.STARTING, {"t1": (0,)}))


def test_reused_pod_holds_no_extra_gpus() -> None:
    job = starting({"t0": (4, 5)}, generation=2, releasing={"t0": (0, 1)})
    left = Run("a", 1, RunPhase.LEFT)
    assert merge_pod_runs(job, (left,), [pod("t0", 2, phase="Running")], NOW_S)[0] == left


def test_overcommitted_node_loses_the_run() -> None:
    job = starting({"t0": (0, 1, 2, 3)})
    foreign = PodView("other", "kueue", "uid", "t0", 6, "Running", False)
    view = ClusterView(pods=(foreign,), nodes={name: NodeView(name, "1", True, False, 8) for name in NODES})
    crowded = find_overcommitted_nodes(Snapshot(pools=POOLS, nodes=NODES, jobs={"a": job}), view)
    assert crowded == {"t0"}
    (run,) = merge_pod_runs(
        job, (), [pod("t0", 4, bound=False)], NOW_S, obstacles=StartObstacles(overcommitted=crowded)
    )
    assert run.phase is RunPhase.LOST
    assert "t0" in run.reason
    (run,) = merge_pod_runs(job, (), [pod("t0", 4)], NOW_S, obstacles=StartObstacles(overcommitted=crowded))
    assert run.phase is RunPhase.STARTING, "a bound pod has its GPUs"


def test_live_agents_are_in_pods_that_hold_gpus() -> None:
    pods = [pod("t0", 2), pod("t1", 2, phase="Failed")]
    assert find_live_agents(pods) == {("a", "t0"): "uid-a-g1-t0"}


def test_agent_end_has_its_cause() -> None:
    killed = replace(pod("t0", 2, phase="Failed"), error="OOMKilled", exit_code=137)
    evicted = replace(pod("t1", 2, phase="Failed"), reason="Evicted")
    deleted = replace(pod("t2", 2, phase="Succeeded"), is_deleting=True, exit_code=0)
    greedy = replace(pod("t3", 2, phase="Failed"), is_deleting=True, error="OOMKilled", exit_code=137)
    ends = find_agent_ends([killed, evicted, deleted, greedy])
    assert ends[killed.uid].cause is FailureCause.OUT_OF_MEMORY
    assert ends[killed.uid].is_fault
    assert not ends[evicted.uid].is_fault
    assert not ends[deleted.uid].is_fault, "a deleted agent is not at fault"
    assert ends[greedy.uid].is_fault


def bound_and_ready(bound: str, ready: str | None, *, restarts: int = 0) -> dict[str, Any]:
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": bound},
        {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": ready or bound},
    ]
    return {"phase": "Running", "conditions": conditions, "containerStatuses": [{"restartCount": restarts}]}


@pytest.mark.parametrize(
    ("status", "seconds"),
    [
        (bound_and_ready("2026-11-27T08:00:00Z", "2026-11-27T08:01:14Z"), 74.0),
        (bound_and_ready("2026-11-27T08:00:00Z", None), None),
        (bound_and_ready("2026-11-27T08:00:00Z", "2026-11-27T09:00:00Z", restarts=1), None),
        (bound_and_ready("yesterday", "2026-11-27T09:00:00Z"), None),
        ({"phase": "Running"}, None),
    ],
)
def test_start_of_a_replica_is_read_from_its_conditions(status: dict[str, Any], seconds: float | None) -> None:
    start = parse_pod_view({"metadata": {"name": "a"}, "status": status}).replica_start
    assert (None if start is None else start.seconds) == seconds


def test_a_node_reports_the_start_of_the_newest_replica_that_is_not_ours() -> None:
    snapshot = a_snapshot(a_fleet(training=1, inference=1))
    nodes = {name: NodeView(name, "1", is_ready=True, is_cordoned=False, gpus=8) for name in snapshot.nodes}
    starts = (ReplicaStart(50.0, 20.0), ReplicaStart(90.0, 30.0), None)
    pods = tuple(
        PodView("serving", f"p{at}", f"u{at}", node, 1, "Running", is_deleting=False, replica_start=start)
        for at, start in enumerate(starts)
        for node in ("i0", "t0")
    )
    facts = observe_nodes(snapshot, ClusterView(pods=pods, nodes=nodes))
    assert (facts["i0"].replica_start, facts["t0"].replica_start) == (ReplicaStart(90.0, 30.0), None)
