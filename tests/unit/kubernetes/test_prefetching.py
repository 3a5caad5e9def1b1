"""Prefetches of images and weights: when their pods exist, what these contain, and what is reported of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from scheduler.domain.events import EventCode
from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import Observation
from scheduler.domain.prefetch import PrefetchPolicy, PrefetchPurpose, PrefetchResult, WeightsTemplate
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import GPU_RESOURCE, LOANED_TAINT, Object
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.cluster_observation import observe_nodes
from scheduler.kubernetes.job_objects import JobDefaults, JobObjectActions
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_view import PodView, parse_pod_view
from scheduler.kubernetes.prefetch_pods import list_images
from scheduler.kubernetes.prefetching import OVERDUE_S, Prefetches
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.builders import a_fleet, a_job, a_snapshot

NOW_S = 1_795_327_200.0
CREATED = "2026-11-22T06:00:00Z"
TIMEOUT_S = 300.0
WEIGHTS = WeightsTemplate("chat", "pull-weights")
TEMPLATE = {"template": {"spec": {"containers": [{"name": "pull", "image": "llm:1", "command": ["pull"]}]}}}
NODE = NodeView("i0", "1", is_ready=True, is_cordoned=False, gpus=8, uid="node-uid")
STARTED = {"terminated": {"reason": "StartError", "exitCode": 128}}
DENIED = {"waiting": {"reason": "ErrImagePull", "message": "denied"}}
UNKNOWN = {"terminated": {"reason": "ContainerStatusUnknown", "exitCode": 137}}


class World:
    """One inference node, the pods of prefetches on it, and an API server in memory."""

    def __init__(self, policy: PrefetchPolicy | None) -> None:
        self.policy = policy
        self.created: list[Object] = []
        self.deleted: list[str] = []
        self.statuses: dict[str, Any] = {}
        self.template: Object = TEMPLATE
        self.refusal: ApiError | None = None
        self.foreign: tuple[PodView, ...] = ()
        self.now_s = NOW_S
        self.prefetches_on_node: tuple[PrefetchResult, ...] = ()
        self.jobs = [a_job("a", 8)]
        api = cast(Any, self)
        defaults = JobDefaults("research", "http://127.0.0.1:1", "worker:1", AgentImage("agent:1"), ("registry",))
        objects = JobObjectActions(api, api, defaults, epoch=lambda: 1, agent_token=lambda job_id: job_id)
        self.prefetches = Prefetches(api, api, list_job_images=objects.list_images)

    def create(self, kind: object, item: Object) -> Object:
        if self.refusal is not None:
            raise self.refusal
        self.created.append(item)
        return item

    def get(self, kind: object, name: str, namespace: str) -> Object:
        assert (namespace, name) == (WEIGHTS.namespace, WEIGHTS.pod_template)
        return self.template

    def delete(self, kind: object, name: str, namespace: str, **options: object) -> None:
        self.deleted.append(name)
        self.created = [item for item in self.created if item["metadata"]["name"] != name]

    def assume(self, kind: object, item: Object) -> None:
        """The view is built from `created`."""

    def assume_deleted(self, pod: PodView) -> None:
        """The view is built from `created`."""

    def desired(self, state: LoanState | None) -> Snapshot:
        fleet = a_fleet(training=0, inference=1, lending=LendingPolicy(prefetch=self.policy))
        loans = [] if state is None else [Loan("i0-1", "i0", "inference", state, 0.0, 0.0)]
        snapshot = a_snapshot(fleet, self.jobs, loans, now_s=self.now_s)
        return replace(snapshot, nodes={"i0": replace(snapshot.nodes["i0"], prefetches=self.prefetches_on_node)})

    def view(self) -> ClusterView:
        pods = []
        for item in self.created:
            meta = {**item["metadata"], "uid": item["metadata"]["name"], "creationTimestamp": CREATED}
            pods.append(parse_pod_view({**item, "metadata": meta, "status": self.statuses.get(meta["name"], {})}))
        return ClusterView(pods=self.foreign, nodes={"i0": NODE}, prefetch_pods=tuple(pods))

    def converge(self, state: LoanState | None) -> list[Object]:
        """Carry out the plan, and return the pods that exist."""
        for action in self.prefetches.plan(self.desired(state), self.view(), self.now_s):
            action.run()
        return self.created

    def observe(self, state: LoanState | None) -> list[tuple[EventCode, str]]:
        """Record what is observed, and return code and cause of the new events."""
        desired, view = self.desired(state), self.view()
        results = self.prefetches.list_results(desired, view, self.now_s)
        nodes = observe_nodes(desired, view, prefetches=results)
        found = update_snapshot(desired, Observation(self.now_s, 0, (), nodes), ())
        self.prefetches_on_node = found.snapshot.nodes["i0"].prefetches
        codes = (EventCode.NODE_PREFETCHED, EventCode.PREFETCH_FAILED)
        return [(event.code, event.cause) for event in found.events if event.code in codes]

    def report(self, *states: Any, phase: str = "Failed", **status: Any) -> None:
        """Let a kubelet report these container states for the only pod."""
        (pod,) = self.created
        statuses = [
            {"name": each["name"], "image": each["image"], "state": state}
            for each, state in zip(pod["spec"]["containers"], states, strict=False)
        ]
        self.statuses[pod["metadata"]["name"]] = {"phase": phase, "containerStatuses": statuses, **status}


def a_replica(image: str = "llm:1") -> PodView:
    spec = {
        "nodeName": "i0",
        "containers": [{"name": "llm", "image": image, "resources": {"limits": {GPU_RESOURCE: "8"}}}],
        "imagePullSecrets": [{"name": "llm-registry"}],
    }
    pod = {"metadata": {"name": image, "namespace": "chat"}, "spec": spec, "status": {"phase": "Running"}}
    return parse_pod_view(pod)


def images_of(pod: Object) -> list[str]:
    return [each["image"] for each in pod["spec"]["containers"]]


@pytest.fixture
def world() -> World:
    return World(PrefetchPolicy(timeout_s=TIMEOUT_S))


def test_images_of_jobs_are_pulled_while_the_node_is_offered(world: World) -> None:
    for state in (None, LoanState.PROPOSED, LoanState.ACTIVE, LoanState.RECALLED):
        assert world.converge(state) == []
    (pod,) = world.converge(LoanState.OFFERED)
    assert sorted(images_of(pod)) == ["agent:1", "worker:1"]
    assert pod["metadata"]["namespace"] == "research"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert world.converge(LoanState.OFFERED) == [pod], "it is created once"


def test_pod_takes_no_room_and_ends_with_its_node_or_at_its_deadline(world: World) -> None:
    (pod,) = world.converge(LoanState.OFFERED)
    spec = pod["spec"]
    assert (spec["nodeName"], spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("i0", "Never", TIMEOUT_S)
    assert {**LOANED_TAINT, "operator": "Equal"} in spec["tolerations"]
    assert all("resources" not in each for each in spec["containers"])
    assert [each["uid"] for each in pod["metadata"]["ownerReferences"]] == ["node-uid"]


def test_jobs_that_cannot_use_lent_nodes_do_not_count(world: World) -> None:
    fixed = a_job("b", 8)
    world.jobs = [replace(fixed, spec=replace(fixed.spec, fungible=False))]
    assert world.converge(LoanState.OFFERED) == []
    world.jobs = [replace(fixed, spec=replace(fixed.spec, gpu="l4"))]
    assert world.converge(LoanState.OFFERED) == []


def test_images_of_replicas_are_pulled_while_the_node_is_recalled(world: World) -> None:
    world.foreign = (a_replica(), a_replica(), a_replica("asr:1"))
    world.converge(LoanState.ACTIVE)
    world.foreign = ()  # the pool was scaled to nothing since
    pods = world.converge(LoanState.RECALLED)
    assert [images_of(pod) for pod in pods] == [["llm:1"], ["asr:1"]]
    assert {pod["metadata"]["namespace"] for pod in pods} == {"chat"}
    assert pods[0]["spec"]["imagePullSecrets"] == [{"name": "llm-registry"}]


def test_pool_without_a_policy_loads_nothing() -> None:
    world = World(None)
    world.foreign = (a_replica(),)
    for state in LoanState:
        assert world.converge(state) == []


@pytest.mark.parametrize(
    ("states", "status", "ended", "error"),
    [
        ((STARTED, STARTED), {}, True, ""),
        ((STARTED, {"waiting": {"reason": "CreateContainerError"}}), {"phase": "Pending"}, True, ""),
        ((STARTED, {"running": {}}), {"phase": "Running"}, True, ""),
        ((STARTED,), {"phase": "Running"}, False, ""),
        ((STARTED, {"waiting": {"reason": "ContainerCreating"}}), {"phase": "Pending"}, False, ""),
        ((STARTED, DENIED), {"phase": "Pending"}, False, ""),
        ((STARTED, UNKNOWN), {"reason": "DeadlineExceeded"}, True, "DeadlineExceeded"),
        ((), {"reason": "Evicted", "message": "disk pressure"}, True, "disk pressure"),
        ((DENIED, DENIED), {"reason": "DeadlineExceeded"}, True, "denied"),
        ((), {}, True, "ended before"),
    ],
)
def test_result_is_what_the_kubelet_says_of_the_images(
    world: World, states: tuple[Any, ...], status: dict[str, Any], ended: bool, error: str
) -> None:
    world.converge(LoanState.OFFERED)
    world.report(*states, **status)
    world.now_s = NOW_S + 40.0
    code = EventCode.PREFETCH_FAILED if error else EventCode.NODE_PREFETCHED
    assert world.observe(LoanState.OFFERED) == ([(code, "training")] if ended else [])
    for result in world.prefetches_on_node:
        assert (result.purpose, result.seconds) == (PrefetchPurpose.TRAINING, 40.0)
        assert error in result.error
        assert bool(result.error) is bool(error)
    assert world.observe(LoanState.OFFERED) == [], "it is reported once"


def test_pod_is_removed_once_its_end_is_recorded_and_its_loan_has_gone_on(world: World) -> None:
    world.converge(LoanState.OFFERED)
    assert world.converge(LoanState.ACTIVE), "it goes on while jobs run"
    world.report(STARTED, STARTED)
    assert world.converge(LoanState.ACTIVE), "its end is not recorded yet"
    world.observe(LoanState.ACTIVE)
    assert world.converge(LoanState.OFFERED), "a second one would be created"
    assert world.converge(LoanState.ACTIVE) == []
    assert world.observe(LoanState.ACTIVE) == []
    assert world.prefetches_on_node == ()


def test_pod_that_no_kubelet_ends_is_given_up(world: World) -> None:
    world.converge(LoanState.OFFERED)
    world.now_s = NOW_S + TIMEOUT_S + OVERDUE_S - 1.0
    assert world.observe(None) == []
    world.now_s += 1.0
    assert world.observe(None) == [(EventCode.PREFETCH_FAILED, "training")]
    assert world.converge(None) == []


def test_refused_pod_is_reported_and_not_repeated_for_the_loan(world: World) -> None:
    world.refusal = ApiError(403, "Forbidden", "exceeded quota")
    world.converge(LoanState.OFFERED)
    assert world.observe(LoanState.OFFERED) == [(EventCode.PREFETCH_FAILED, "training")]
    world.refusal = None
    assert world.converge(LoanState.OFFERED) == []
    world.converge(LoanState.ACTIVE)
    assert world.observe(LoanState.ACTIVE) == []
    assert world.prefetches_on_node == ()


def test_pod_is_tried_again_after_an_unclear_response(world: World) -> None:
    world.refusal = ApiError(503, "ServiceUnavailable", "try later")
    with pytest.raises(ApiError):
        world.converge(LoanState.OFFERED)
    assert world.observe(LoanState.OFFERED) == []
    world.refusal = None
    assert len(world.converge(LoanState.OFFERED)) == 1


@pytest.fixture
def weights() -> World:
    return World(PrefetchPolicy(images=False, weights=WEIGHTS, timeout_s=TIMEOUT_S))


def test_weights_are_loaded_by_the_pod_of_the_template(weights: World) -> None:
    assert weights.converge(LoanState.OFFERED) == []
    (pod,) = weights.converge(LoanState.RECALLED)
    spec = pod["spec"]
    assert spec["containers"] == TEMPLATE["template"]["spec"]["containers"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [each["matchFields"][0]["values"] for each in terms] == [["i0"]]
    assert "nodeName" not in spec, "the Kubernetes scheduler binds its volumes"
    weights.report({"terminated": {"reason": "Completed", "exitCode": 0}}, phase="Succeeded")
    assert weights.observe(None) == [(EventCode.NODE_PREFETCHED, "weights")]
    assert weights.converge(None) == []


def test_failed_weights_are_reported_with_their_reason(weights: World) -> None:
    weights.converge(LoanState.RECALLED)
    weights.report({"terminated": {"reason": "Error", "exitCode": 1, "message": "no such bucket"}})
    assert weights.observe(LoanState.RECALLED) == [(EventCode.PREFETCH_FAILED, "weights")]
    assert "no such bucket" in weights.prefetches_on_node[0].error


@pytest.mark.parametrize("kind", ["limits", "requests"])
def test_template_that_requests_gpus_is_refused(weights: World, kind: str) -> None:
    container = {"name": "pull", "image": "llm:1", "resources": {kind: {GPU_RESOURCE: "1"}}}
    weights.template = {"template": {"spec": {"containers": [container]}}}
    assert weights.converge(LoanState.RECALLED) == []
    assert weights.observe(LoanState.RECALLED) == [(EventCode.PREFETCH_FAILED, "weights")]


def test_images_are_those_of_containers_and_of_volumes_once_each() -> None:
    spec = {
        "initContainers": [{"image": "init"}],
        "containers": [{"image": "main"}, {"image": "init"}, {}],
        "volumes": [{"image": {"reference": "weights"}}, {"emptyDir": {}}],
    }
    assert list_images("chat", spec).images == ("init", "main", "weights")


def test_label_alone_makes_no_prefetch() -> None:
    pod = {"metadata": {"name": "a", "labels": {"ebbtide.dev/prefetch": "serving"}}}
    assert parse_pod_view(pod).prefetch is None
