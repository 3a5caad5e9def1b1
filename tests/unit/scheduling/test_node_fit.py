"""Nodes on which the pods of a job fit: placement, explanations and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.decisions import Decision, Reason, ReasonCode, ResizeJob, StartJob
from scheduler.domain.fleet import Node
from scheduler.domain.host_ports import compute_port_requests
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.node_selection import NodeRequirement, Taint
from scheduler.domain.observation import NodeFacts, Observation, Run, RunPhase
from scheduler.domain.placement_record import (
    FREE_REFUSALS,
    AvoidedNode,
    PlacementRecord,
    PodRefusal,
    TemplateReview,
    VolumeFacts,
)
from scheduler.domain.pod_requirements import UNKNOWN_CAPACITY, AddedRequirements, NodeCapacity
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Invariant, TickResult
from scheduler.scheduling.explanation import explain
from scheduler.scheduling.legality import find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.builders import GPU, a_fleet, a_job, a_node, a_snapshot

GIB = 2**30
CAPACITY = NodeCapacity(
    allocatable=(("cpu", 64_000), ("memory", 512 * GIB), ("pods", 110)), labels=(("disk", "ssd"), ("zone", "a"))
)
REFUSAL = PodRefusal("t0", "OutOfcpu", "Pod was rejected: too little cpu")


def a_host(name: str, **changes: Any) -> Node:
    return a_node(name, capacity=replace(CAPACITY, **changes))


def fleet(*nodes: Node) -> tuple[Any, dict[str, Node]]:
    return a_fleet(training=0, inference=0)[0], {node.name: node for node in nodes}


def requesting(job_id: str, gpus: int, *, per: str = "", spec: dict[str, Any] | None = None, **requests: str) -> Job:
    container = {"name": "main", "resources": {"requests": requests}}
    template = json.dumps({"spec": {"containers": [container], **(spec or {})}})
    job = a_job(job_id, gpus, template_json=template, resources_per=per)
    return replace(job, placement=PlacementRecord(review=TemplateReview()))


def decided(snapshot: Snapshot, policy: str = "ebbtide") -> TickResult:
    return decide(snapshot, load_policy_set(policy))


def targets(decisions: tuple[Decision, ...]) -> dict[str, dict[str, int]]:
    placed = (each for each in decisions if isinstance(each, StartJob | ResizeJob))
    return {each.job_id: {node: len(indices) for node, indices in each.gpus.items()} for each in placed}


@pytest.mark.parametrize("policy", sorted(list_policy_sets()))
def test_job_that_fits_on_no_node_delays_no_other(policy: str) -> None:
    jobs = [requesting("hopeless", 8, cpu="96"), requesting("wide", 16, cpu="8")]
    result = decided(a_snapshot(fleet(a_host("t0"), a_host("t1")), jobs), policy)
    assert targets(result.decisions) == {"wide": {"t0": 8, "t1": 8}}
    reason = result.waiting["hopeless"]
    assert reason.code is ReasonCode.NO_FEASIBLE_NODE
    assert "needs 96 CPUs per node; the largest node of pool training has 64 CPUs" in reason.detail


def test_explanation_says_what_is_missing() -> None:
    snapshot = a_snapshot(fleet(a_host("t0")), [requesting("hopeless", 8, cpu="96")])
    found = explain(snapshot, decided(snapshot).waiting, "hopeless")
    assert found.reason is not None
    assert found.reason.numbers["feasible_gpus"] == 0.0
    assert found.unblocks


def test_gpus_on_a_node_are_limited_by_resources_per_gpu() -> None:
    jobs = [requesting("bound", 8, per="gpu", cpu="16")]
    result = decided(a_snapshot(fleet(a_host("t0"), a_host("t1"), a_host("t2")), jobs))
    assert targets(result.decisions) == {"bound": {"t0": 4, "t1": 4}}


def test_resources_of_other_jobs_and_of_foreign_pods_are_taken() -> None:
    nodes = fleet(a_host("t0", requested=(("cpu", 40_000),)), a_host("t1"))
    jobs = [requesting("first", 2, cpu="40"), requesting("second", 2, cpu="40"), requesting("third", 2, cpu="20")]
    result = decided(a_snapshot(nodes, jobs))
    placed = targets(result.decisions)
    assert placed.keys() == {"first", "third"}
    assert placed["first"] == {"t1": 2}
    assert result.waiting["second"].code in (ReasonCode.NO_MATCHING_FLAVOR, ReasonCode.INSUFFICIENT_GPUS)


def serving(job_id: str, *, port: int = 8080) -> Job:
    container = {"name": "main", "ports": [{"containerPort": port, "hostPort": port}]}
    job = a_job(job_id, 2, template_json=json.dumps({"spec": {"containers": [container]}}))
    return replace(job, placement=PlacementRecord(review=TemplateReview()))


def test_pods_with_the_same_host_port_share_no_node() -> None:
    nodes = fleet(a_host("t0"), a_host("t1"))
    jobs = [serving("first"), serving("second"), serving("third"), serving("other", port=8081)]
    result = decided(a_snapshot(nodes, jobs))
    placed = targets(result.decisions)
    assert placed.keys() == {"first", "second", "other"}
    assert placed["first"].keys() != placed["second"].keys()
    assert result.waiting["third"].code in (ReasonCode.NO_MATCHING_FLAVOR, ReasonCode.INSUFFICIENT_GPUS)


def test_host_port_of_a_foreign_pod_is_named() -> None:
    used = tuple(compute_port_requests({"containers": [{"ports": [{"hostPort": 8080}]}]}).items())
    result = decided(a_snapshot(fleet(a_host("t0", requested=used)), [serving("job")]))
    assert not result.decisions
    reason = result.waiting["job"]
    assert reason.code is ReasonCode.NO_FEASIBLE_NODE
    assert "host port 8080/TCP (1 of 1 nodes)" in reason.detail


@pytest.mark.parametrize(
    ("spec", "node"),
    [
        ({"nodeSelector": {"disk": "ssd"}}, "t1"),
        ({"nodeSelector": {"disk": "hdd"}}, "t0"),
        ({"tolerations": [{"key": "team", "operator": "Exists"}], "nodeSelector": {"zone": "b"}}, "t2"),
        ({"nodeSelector": {"zone": "b"}}, None),
    ],
)
def test_selectors_and_taints_choose_the_node(spec: dict[str, Any], node: str | None) -> None:
    taints = (Taint("team", "vision", "NoSchedule"),)
    nodes = (
        a_host("t0", labels=(("disk", "hdd"),)),
        a_host("t1"),
        a_host("t2", labels=(("zone", "b"),), taints=taints),
    )
    result = decided(a_snapshot(fleet(*nodes), [requesting("chosen", 2, spec=spec)]))
    assert targets(result.decisions) == ({"chosen": {node: 2}} if node else {})


def test_job_with_claims_waits_until_they_were_read_and_follows_their_volumes() -> None:
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    job = requesting("mounts", 2, spec={"volumes": volumes})
    nodes = fleet(a_host("t0"), a_host("t1", labels=(("zone", "b"),)))
    missing = VolumeFacts("ClaimNotFound", "template: claim jobs/data does not exist")
    in_zone_b = VolumeFacts(terms=(((NodeRequirement("zone", "In", ("b",)),),),))
    for facts, expected in ((None, {}), (missing, {}), (in_zone_b, {"mounts": {"t1": 2}})):
        known = replace(job, placement=replace(job.placement, volumes=facts))
        result = decided(a_snapshot(nodes, [known]))
        assert targets(result.decisions) == expected
        assert expected or result.waiting["mounts"].code is ReasonCode.VOLUME_NOT_READY


def test_additions_of_the_api_server_limit_the_nodes() -> None:
    added = AddedRequirements(steady=(("cpu", 2000),), selector=(("sandbox", "yes"),))
    sandboxed = a_host("t1", labels=(("sandbox", "yes"),))
    for cores, expected in ((62, {"job": {"t1": 2}}), (63, {})):
        job = requesting("job", 2, cpu=str(cores))
        job = replace(job, placement=PlacementRecord(review=TemplateReview(added=added)))
        snapshot = a_snapshot(fleet(a_host("t0"), sandboxed), [job])
        assert targets(decided(snapshot).decisions) == expected


def mounting_once(job_id: str, min_gpus: int, max_gpus: int, **fields: Any) -> Job:
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    template = json.dumps({"spec": {"containers": [{"name": "main"}], "volumes": volumes}})
    job = a_job(job_id, min_gpus, max_gpus, template_json=template, **fields)
    facts = VolumeFacts(needs_one_node=True)
    return replace(job, placement=PlacementRecord(volumes=facts, review=TemplateReview()))


@pytest.mark.parametrize("policy", sorted(list_policy_sets()))
def test_job_whose_volume_one_node_can_mount_is_placed_on_one_node(policy: str) -> None:
    """Four GPUs are free on each of two nodes."""
    running = [
        a_job(f"held-{node}", 4, state=JobState.RUNNING, on={node: (0, 1, 2, 3)}, steps=10**6) for node in ("t0", "t1")
    ]
    for min_gpus, expected in ((2, [1]), (8, [])):
        snapshot = a_snapshot(fleet(a_host("t0"), a_host("t1")), [*running, mounting_once("job", min_gpus, 8)])
        result = decided(snapshot, policy)
        assert [len(gpus) for job_id, gpus in targets(result.decisions).items() if job_id == "job"] == expected
        assert all(each.job_id == "job" for each in result.decisions if isinstance(each, StartJob | ResizeJob))


@pytest.mark.parametrize("policy", sorted(list_policy_sets()))
def test_job_whose_volume_one_node_can_mount_grows_on_its_node_only(policy: str) -> None:
    job = mounting_once("job", 2, 8, state=JobState.RUNNING, on={"t0": (0, 1)}, steps=10**6)
    other = a_job("other", 4, state=JobState.RUNNING, on={"t0": (4, 5, 6, 7)}, steps=10**6)
    snapshot = a_snapshot(fleet(a_host("t0"), a_host("t1")), [job, other], full_pass_at_s=float("-inf"))
    for gpus in targets(decided(snapshot, policy).decisions).values():
        assert gpus.keys() <= {"t0"}


def test_target_on_two_nodes_is_illegal_if_one_node_can_mount_the_volume() -> None:
    snapshot = MutableSnapshot(a_snapshot(fleet(a_host("t0"), a_host("t1")), [mounting_once("job", 4, 8)]))
    plan, reason = build_data_parallel_plan(GPU, 4), Reason(ReasonCode.FIRST_IN_ORDER, "first")
    for gpus, invariant in (({"t0": (0, 1, 2, 3)}, None), ({"t0": (0, 1), "t1": (0, 1)}, Invariant.NODE_DOES_NOT_FIT)):
        found = find_violation(snapshot, StartJob("job", gpus, plan, reason))
        assert (found and found.invariant) is invariant


def test_template_holds_no_gpus_before_the_api_server_accepts_it() -> None:
    job, nodes = requesting("reviewed", 2), fleet(a_host("t0"))
    rejected = TemplateReview("template.spec.volumes[0].hostPath.path: Required value")
    for review, expected in ((None, {}), (rejected, {}), (TemplateReview(), {"reviewed": {"t0": 2}})):
        waiting = replace(job, placement=PlacementRecord())
        reviews = {} if review is None else {job.id: review}
        facts = {"t0": NodeFacts(capacity=CAPACITY)}
        snapshot = update_snapshot(
            a_snapshot(nodes, [waiting]), Observation(0.0, 0, (), facts, {}, reviews), ()
        ).snapshot
        result = decided(snapshot)
        assert targets(result.decisions) == expected
        if not expected:
            reason = result.waiting[job.id]
            code = ReasonCode.TEMPLATE_NOT_CHECKED if review is None else ReasonCode.TEMPLATE_REJECTED
            assert reason.code is code
            assert review is None or reason.detail == review.error


def test_job_without_a_template_and_machines_need_no_review() -> None:
    plain = a_job("plain", 2)
    assert targets(decided(a_snapshot(fleet(a_host("t0")), [plain])).decisions)
    templated = replace(requesting("machine", 2), placement=PlacementRecord())
    assert targets(decided(a_snapshot(a_fleet(training=1, inference=0), [templated])).decisions)


def test_no_pod_fits_on_a_node_that_was_not_observed_yet() -> None:
    assert not decided(a_snapshot(fleet(a_node("t0", capacity=UNKNOWN_CAPACITY)), [a_job("any", 1)])).decisions


def test_running_job_grows_only_as_far_as_its_pod_fits() -> None:
    container = {"name": "main", "resources": {"requests": {"cpu": "10"}}}
    template = json.dumps({"spec": {"containers": [container]}})
    job = a_job(
        "grows",
        2,
        8,
        state=JobState.RUNNING,
        on={"t0": (0, 1)},
        template_json=template,
        resources_per="gpu",
        steps=10**6,
    )
    result = decided(a_snapshot(fleet(a_host("t0")), [job], full_pass_at_s=float("-inf")))
    assert targets(result.decisions) == {"grows": {"t0": 6}}


def refused(job: Job, now_s: float) -> Job:
    started = replace(
        job,
        state=JobState.STARTING,
        allocation=a_job("other", 2, state=JobState.STARTING, on={"t0": (0, 1)}).allocation,
    )
    run = Run(job.id, started.allocation.generation, RunPhase.LOST, reason=str(REFUSAL), refusal=REFUSAL)
    snapshot = a_snapshot(fleet(a_host("t0")), [started], now_s=now_s)
    facts = {"t0": NodeFacts(capacity=CAPACITY)}
    return update_snapshot(snapshot, Observation(now_s, 0, (run,), facts), ()).snapshot.jobs[job.id]


def test_refused_job_backs_off_avoids_the_node_and_then_pays() -> None:
    job = requesting("refused", 2)
    for number in range(1, FREE_REFUSALS + 2):
        job = refused(job, 1000.0)
        assert job.state is JobState.PLANNING
        assert not job.allocation.target
        assert job.placement.streak == number
        assert job.account.failures == max(0, number - FREE_REFUSALS)
        reason = decided(a_snapshot(fleet(a_host("t0")), [job], now_s=1000.0)).waiting[job.id]
        assert reason.code is ReasonCode.BACKING_OFF
        assert "OutOfcpu" in reason.detail
    for _ in range(job.spec.retries):
        job = refused(job, 1000.0)
    assert job.state is JobState.FAILED


def test_refused_job_starts_on_another_node() -> None:
    job = requesting("again", 2)
    job = replace(job, placement=replace(job.placement, avoided=(AvoidedNode("t0", 1, 200.0),)))
    nodes = fleet(a_host("t0"), a_host("t1"))
    assert targets(decided(a_snapshot(nodes, [job], now_s=100.0)).decisions) == {"again": {"t1": 2}}
    assert targets(decided(a_snapshot(nodes, [job], now_s=200.0)).decisions) == {"again": {"t0": 2}}
