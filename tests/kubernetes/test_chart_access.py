"""Permissions on a real API server: the operator with exactly the chart's account, and users with the chart's roles.

The roles are the golden renderings in tests/chart, which test_chart.py compares with the chart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from scheduler.domain.commands import CancelJob, ReportDemand, SubmitJob
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import LoanState
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.standby import Standby, StandbyMode
from scheduler.executors.engine_sleep import ReplicaError
from scheduler.executors.standby_replicas import StandbyOrder, StandbyReplica
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import (
    AUTOSCALER,
    CONFIG_MAP,
    DEPLOYMENT,
    ELASTIC_JOB,
    EVENT,
    GPU_PROFILE,
    LEASE,
    LOAN,
    LOAN_LABEL,
    NODE,
    PERSISTENT_VOLUME,
    POD,
    POD_TEMPLATE,
    POOL,
    QUEUE,
    SECRET,
    SERVICE,
    SERVING_LABEL,
    VOLUME_CLAIM,
    Object,
    ResourceKind,
    labels_of,
    uid_of,
)
from scheduler.kubernetes.client import EvictionResult, KubernetesClient, connect
from scheduler.kubernetes.event_recorder import EventSeriesLog, build_event_writes, index_event_objects
from scheduler.kubernetes.leader_election import LeaderElector
from scheduler.kubernetes.resource_writes import Writes
from scheduler.kubernetes.resources.gpu_profile import build_gpu_profile
from scheduler.kubernetes.spec_commands import ClusterResources
from scheduler.kubernetes.warm_replicas import WarmControl
from scheduler.solver.profiles.catalog import read_gpu_json
from scheduler.store.protocol import StoredEvent
from tests.builders import a_job, a_loan
from tests.chart import manifests
from tests.kubernetes.conftest import UNHURRIED
from tests.kubernetes.control_plane import SERVICE_ACCOUNT, ControlPlane
from tests.kubernetes.custom_resources import carry_out
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.objects import BUDGET, NAMESPACE, build_config_map, build_pod
from tests.kubernetes.operated import Operated
from tests.kubernetes.site import Site
from tests.kubernetes.test_resource_rounds import LISTED, RealServer
from tests.kubernetes.waiting import eventually
from tests.unit.kubernetes import operator_rig
from tests.unit.kubernetes.operator_rig import OperatorRig

RBAC = "rbac.authorization.k8s.io"
ROLE = ResourceKind(RBAC, "v1", "Role", "roles")
ROLE_BINDING = ResourceKind(RBAC, "v1", "RoleBinding", "rolebindings")
CLUSTER_ROLE = ResourceKind(RBAC, "v1", "ClusterRole", "clusterroles", is_namespaced=False)
CLUSTER_ROLE_BINDING = ResourceKind(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", is_namespaced=False)
ACCESS = (SERVICE_ACCOUNT, CLUSTER_ROLE, CLUSTER_ROLE_BINDING, ROLE, ROLE_BINDING)
HOME = manifests.NAMESPACE
JOB = {"gpus": {"min": 1, "max": 2}, "command": ["true"]}


@pytest.fixture(scope="session")
def granted(control_plane: ControlPlane, definitions: None) -> None:
    """Create the accounts and roles of the chart."""
    admin = connect(control_plane.admin_kubeconfig, limits=UNHURRIED)
    if admin.get_or_none(NAMESPACE, HOME) is None:
        admin.create(NAMESPACE, {"metadata": {"name": HOME}})
    for kind in ACCESS:
        for each in manifests.read("postgresql"):
            if each["kind"] == kind.name:
                place = {"namespace": HOME} if kind.is_namespaced else {}
                admin.apply(kind, {**each, "metadata": {**each["metadata"], **place}})
    admin.close()


def account(plane: ControlPlane, component: str) -> KubernetesClient:
    return connect(plane.kubeconfig_of_service_account(f"ebbtide-{component}", HOME), limits=UNHURRIED)


@pytest.fixture
def operator(control_plane: ControlPlane, granted: None) -> Iterator[KubernetesClient]:
    """Yield a client with the operator's token."""
    opened = account(control_plane, "operator")
    yield opened
    opened.close()


def user(plane: ControlPlane, admin: KubernetesClient, name: str, role: str, namespace: str) -> KubernetesClient:
    """Return a client of a user with one of the chart's roles in one namespace."""
    binding = {
        "metadata": {"name": name, "namespace": namespace},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": name}],
    }
    admin.apply(ROLE_BINDING, binding)
    return connect(plane.kubeconfig_of_user(name), limits=UNHURRIED)


def is_forbidden(call: Callable[[], object]) -> bool:
    with pytest.raises(ApiError) as refused:
        call()
    return refused.value.status == 403


def test_jobs_run_and_nodes_are_lent_and_recalled(
    operator: KubernetesClient, kubelet: FakeKubelet, namespace: str, tmp_path: Path
) -> None:
    site = Site(operator, kubelet, namespace, tmp_path)
    lending = LendingPolicy(headroom=0.0, return_deadline_s=30, cold_start_s=0, demand_profile=(0.0,) * 24)
    site.add_pools(training=1, inference=2, lending=lending)
    site.send(ReportDemand("inference", 0.0))
    site.send(
        SubmitJob(
            "llama-1",
            JobSpec("llama-1", 8, 16, steps=10**9, command=("python", "train.py"), on_resize=OnResize.CHECKPOINT),
        )
    )
    site.step()
    site.until(lambda: _runs_on(site, 16), what="it runs on a node of its own and a lent one")
    assert any(LOAN_LABEL in labels_of(node) for node in operator.list(NODE).items)
    site.send(ReportDemand("inference", 16.0))
    site.until(lambda: not site.snapshot.loans and _runs_on(site, 8), what="lent nodes are home, and it goes on")
    site.send(CancelJob("llama-1"))
    site.until(lambda: site.job("llama-1").state is JobState.CANCELLED, what="it is cancelled")
    site.until(lambda: not site.pods(), what="its pods are gone")
    site.until(lambda: not operator.list(SERVICE, namespace=namespace).items, what="its service is gone")
    site.close()


def _runs_on(site: Site, gpus: int) -> bool:
    job = site.snapshot.jobs.get("llama-1")
    return job is not None and job.state is JobState.RUNNING and job.allocation.held_gpus == gpus


class ByOperator(RealServer):
    """An administrator creates resources; the operator reads and writes them."""

    def __init__(self, admin: KubernetesClient, operator: KubernetesClient, namespace: str) -> None:
        super().__init__(admin, namespace)
        self._operator = operator

    def resources(self) -> ClusterResources:
        jobs = self._operator.list(ELASTIC_JOB, namespace=self.namespace).items
        return ClusterResources(jobs, *(self._operator.list(kind).items for kind in LISTED))

    def execute(self, every: Iterable[Writes]) -> None:
        carry_out(self._operator, every)


def test_resources_are_read_told_and_let_go(
    cluster: KubernetesClient, operator: KubernetesClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_rig, "NAMESPACE", namespace)
    server = ByOperator(cluster, operator, namespace)
    server.add(POOL, "training", {"kind": "training", "nodeSelector": {"role": "train"}})
    server.add(POOL, "inference", {"kind": "inference", "nodeSelector": {"role": "serve"}})
    server.add(QUEUE, "research", {"guaranteed": 8})
    server.add(GPU_PROFILE, "a100-80g", build_gpu_profile("a100-80g", json.loads(read_gpu_json("a100-80g")))["spec"])
    server.add_node("access-t0", role="train")
    server.add_node("access-i0", role="serve")
    rig = OperatorRig(server=server)  # type: ignore[arg-type]  # it does what OperatorRig asks of a server
    rig.run_until_stable()
    job = a_job("llama-abc123", 2, 8, state=JobState.RUNNING, on={"access-t0": (0, 1)}, now_s=rig.snapshot.now_s)
    loan = a_loan("access-i0")
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job}, loans={"access-i0": loan})
    rig.run_until_stable()
    assert operator.get(ELASTIC_JOB, job.id, namespace)["status"]["phase"] == "Running"
    assert operator.get(LOAN, loan.id)["status"]["state"] == "active"
    assert all(each["status"]["conditions"] for kind in (POOL, GPU_PROFILE) for each in operator.list(kind).items)

    known = index_event_objects(server.resources(), rig.snapshot, job_namespace=namespace)
    events = [
        StoredEvent(at, 1, Event(rig.snapshot.now_s + at, EventCode.JOB_GROWN, job.id, "to 6 GPUs")) for at in (0, 1)
    ]
    log, steps = build_event_writes(EventSeriesLog(), events[:1], known, reporting_instance="operator-0")
    server.execute(steps)
    server.execute(build_event_writes(log, events[1:], known, reporting_instance="operator-0")[1])
    (reported,) = cluster.list(EVENT, namespace=namespace).items
    assert reported["series"]["count"] == 2

    operator.delete(ELASTIC_JOB, job.id, namespace)
    cluster.delete(POOL, "training")
    pools = {name: pool for name, pool in rig.snapshot.pools.items() if name != "training"}
    rig.snapshot = replace(rig.snapshot, jobs={}, loans={}, nodes={}, pools=pools)
    rig.write(ended_loans={loan.id: replace(loan, state=LoanState.RETURNED)})
    assert server.resources().elastic_jobs == ()
    assert operator.get(LOAN, loan.id)["status"]["state"] == "returned"
    rig.snapshot = replace(rig.snapshot, now_s=rig.snapshot.now_s + 86_400.0)
    rig.write()
    assert operator.list(LOAN).items == ()


def test_an_inference_pod_is_evicted_as_its_budget_allows(
    cluster: KubernetesClient, operator: KubernetesClient, kubelet: FakeKubelet, namespace: str
) -> None:
    kubelet.add_node(f"{namespace}-n0")
    pod = cluster.create(POD, build_pod("chat", namespace, gpus=1, labels={"app": "chat"}))
    operator.bind(pod, f"{namespace}-n0")
    running = partial(_running, cluster, namespace)
    eventually(running, what="it runs: one that waits is protected by no budget")
    selector = {"matchLabels": {"app": "chat"}}
    budget = {"metadata": {"name": "chat", "namespace": namespace}, "spec": {"minAvailable": 1, "selector": selector}}
    cluster.create(BUDGET, budget)
    assert operator.evict(pod) is EvictionResult.BLOCKED
    cluster.delete(BUDGET, "chat", namespace)
    assert operator.evict(pod) is EvictionResult.EVICTED
    gone = {"metadata": {"name": "gone", "namespace": namespace, "uid": "0"}}
    assert operator.evict(gone) is EvictionResult.NOT_FOUND


def _running(cluster: KubernetesClient, namespace: str) -> bool:
    return bool(cluster.get(POD, "chat", namespace)["status"]["phase"] == "Running")


def test_it_leads_by_its_lease_and_by_no_other_and_nowhere_else(operator: KubernetesClient, namespace: str) -> None:
    election = LeaderElector(operator, name="ebbtide-operator", namespace=HOME, identity="a")
    assert election.try_acquire_or_renew()
    assert election.try_acquire_or_renew()
    election.release()
    assert not LeaderElector(operator, name="other", namespace=HOME, identity="a").try_acquire_or_renew()
    assert not LeaderElector(
        operator, name="ebbtide-operator", namespace=namespace, identity="a"
    ).try_acquire_or_renew()


def test_demand_can_be_read_of_deployments_and_autoscalers(operator: KubernetesClient) -> None:
    for kind in (DEPLOYMENT, AUTOSCALER):
        since = operator.list(kind).resource_version
        operator.watch(kind, resource_version=since, timeout_s=1.0).close()


def test_claims_are_looked_at_one_by_one_and_never_changed(operator: KubernetesClient, namespace: str) -> None:
    assert operator.get_or_none(VOLUME_CLAIM, "any", namespace) is None
    assert is_forbidden(lambda: operator.list(VOLUME_CLAIM, namespace=namespace))
    assert is_forbidden(lambda: operator.delete(VOLUME_CLAIM, "any", namespace))
    assert operator.get_or_none(PERSISTENT_VOLUME, "any") is None
    assert is_forbidden(lambda: operator.list(PERSISTENT_VOLUME))
    assert is_forbidden(lambda: operator.delete(PERSISTENT_VOLUME, "any"))


ROLE_OF_ALL = {"metadata": {"name": "all"}, "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
BEYOND: dict[str, Callable[[KubernetesClient, str], object]] = {
    "read a secret": lambda at, space: at.get(SECRET, "ebbtide-token", HOME),
    "list secrets": lambda at, space: at.list(SECRET, namespace=space),
    "make a node": lambda at, space: at.create(NODE, {"metadata": {"name": "mine"}}),
    "delete a node": lambda at, space: at.delete(NODE, "any"),
    "change a node's status": lambda at, space: at.patch_status(NODE, "any", change={"status": {}}),
    "make a role": lambda at, space: at.create(CLUSTER_ROLE, ROLE_OF_ALL),
    "change its own role": lambda at, space: at.patch(CLUSTER_ROLE, "ebbtide-operator", change={"rules": []}),
    "make a pool": lambda at, space: at.create(POOL, {"metadata": {"name": "mine"}, "spec": {}}),
    "delete a pool": lambda at, space: at.delete(POOL, "any"),
    "delete a queue": lambda at, space: at.delete(QUEUE, "any"),
    "delete a GPU profile": lambda at, space: at.delete(GPU_PROFILE, "any"),
    "change what a loan is of": lambda at, space: at.patch(LOAN, "any", change={"spec": {"node": "other"}}),
    "change a pod": lambda at, space: at.patch(POD, "any", space, change={"metadata": {"labels": {"a": "b"}}}),
    "run in a pod": lambda at, space: at.post_subresource(POD, "any", space, subresource="exec", body={}),
    "change a deployment": lambda at, space: at.patch(DEPLOYMENT, "any", space, change={"spec": {"replicas": 0}}),
    "make a namespace": lambda at, space: at.create(NAMESPACE, {"metadata": {"name": "mine"}}),
    "be another account": lambda at, space: at.post_subresource(
        SERVICE_ACCOUNT, "any", space, subresource="token", body={}
    ),
}


@pytest.mark.parametrize("what", BEYOND)
def test_the_operator_may_not(operator: KubernetesClient, namespace: str, what: str) -> None:
    assert is_forbidden(lambda: BEYOND[what](operator, namespace))


def test_the_api_may_do_nothing_at_all(control_plane: ControlPlane, granted: None) -> None:
    opened = account(control_plane, "api")
    for kind in (POD, NODE, SECRET, CONFIG_MAP, ELASTIC_JOB, POOL, LOAN, LEASE):
        assert is_forbidden(partial(opened.list, kind, namespace=HOME)), kind
        assert is_forbidden(partial(opened.create, kind, build_config_map("mine", HOME))), kind
    opened.close()


def test_templates_of_weights_are_read_one_by_one(operator: KubernetesClient, namespace: str) -> None:
    assert operator.get_or_none(POD_TEMPLATE, "any", namespace) is None
    assert is_forbidden(lambda: operator.list(POD_TEMPLATE, namespace=namespace))


def test_warm_replicas_are_labelled_only_in_the_namespaces_of_the_chart(
    cluster: KubernetesClient, operator: KubernetesClient, namespace: str
) -> None:
    labels = {"app": "chat", SERVING_LABEL: "true"}
    pod = cluster.create(POD, build_pod("chat", namespace, labels=labels))
    standby = Standby(namespace, {"app": "chat"}, gpu_memory_bytes=1, mode=StandbyMode.WARM)
    replica = StandbyReplica(uid_of(pod), "n0", "pod chat", namespace=namespace, name="chat")
    control, order = WarmControl(operator), StandbyOrder("n0", standby, asleep=True, replicas=(replica,))
    with pytest.raises(ReplicaError, match="warmStandbys"):
        control.bring(replica, order, is_wanted=lambda: True)
    for kind in (ROLE, ROLE_BINDING):
        (role,) = [each for each in manifests.read("nothing") if is_of_warm_standbys(each, kind)]
        cluster.apply(kind, {**role, "metadata": {**role["metadata"], "namespace": namespace}})
    eventually(lambda: can_bring(control, replica, order), what="the role is in effect")
    assert labels_of(cluster.get(POD, "chat", namespace))[SERVING_LABEL] == "false"


def is_of_warm_standbys(manifest: Object, kind: ResourceKind) -> bool:
    return manifest["kind"] == kind.name and str(manifest["metadata"]["name"]).endswith("-warm-standbys")


def can_bring(control: WarmControl, replica: StandbyReplica, order: StandbyOrder) -> bool:
    try:
        return control.bring(replica, order, is_wanted=lambda: True)
    except ReplicaError:
        return False


def test_an_editor_has_the_jobs_of_the_namespace_and_nothing_else(
    control_plane: ControlPlane, granted: None, cluster: KubernetesClient, namespace: str
) -> None:
    cluster.create(NAMESPACE, {"metadata": {"name": f"{namespace}-else"}})
    for space in (namespace, f"{namespace}-else"):
        cluster.create(ELASTIC_JOB, {"metadata": {"name": "job", "namespace": space}, "spec": JOB})
    ada = user(control_plane, cluster, "ada", "ebbtide-editor", namespace)
    ada.create(ELASTIC_JOB, {"metadata": {"name": "mine", "namespace": namespace}, "spec": JOB})
    ada.patch(ELASTIC_JOB, "job", namespace, change={"spec": {"suspend": True}})
    ada.patch(ELASTIC_JOB, "job", namespace, change={"spec": {"replicas": 2}}, subresource="scale")
    ada.delete(ELASTIC_JOB, "mine", namespace)
    beyond = {
        "write a status": lambda: ada.patch_status(ELASTIC_JOB, "job", namespace, change={"status": {}}),
        "read others' jobs": lambda: ada.get(ELASTIC_JOB, "job", f"{namespace}-else"),
        "list all jobs": lambda: ada.list(ELASTIC_JOB),
        "delete others' jobs": lambda: ada.delete(ELASTIC_JOB, "job", f"{namespace}-else"),
        "read pools": lambda: ada.list(POOL),
        "make a pool": lambda: ada.create(POOL, {"metadata": {"name": "mine"}, "spec": {}}),
        "delete a loan": lambda: ada.delete(LOAN, "any"),
        "make a queue": lambda: ada.create(QUEUE, {"metadata": {"name": "mine"}, "spec": {}}),
        "make a GPU profile": lambda: ada.create(GPU_PROFILE, {"metadata": {"name": "mine"}, "spec": {}}),
        "lend a node": lambda: ada.patch(NODE, "any", change={"metadata": {"labels": {LOAN_LABEL: "mine"}}}),
    }
    assert [what for what, call in beyond.items() if not is_forbidden(call)] == []
    ada.close()


def test_a_viewer_reads_and_writes_nothing(
    control_plane: ControlPlane, granted: None, cluster: KubernetesClient, namespace: str
) -> None:
    cluster.create(ELASTIC_JOB, {"metadata": {"name": "job", "namespace": namespace}, "spec": JOB})
    bob = user(control_plane, cluster, "bob", "ebbtide-viewer", namespace)
    assert bob.get(ELASTIC_JOB, "job", namespace)["spec"]["gpus"] == JOB["gpus"]
    assert is_forbidden(lambda: bob.patch(ELASTIC_JOB, "job", namespace, change={"spec": {"suspend": True}}))
    assert is_forbidden(lambda: bob.delete(ELASTIC_JOB, "job", namespace))
    bob.close()


def test_the_operator_itself_needs_no_more(control_plane: ControlPlane, granted: None, operated: Operated) -> None:
    """Run the operator under the chart's account, from start to handover."""
    operated.kubeconfig = control_plane.kubeconfig_of_service_account("ebbtide-operator", HOME)
    operated.lease_namespace = HOME
    operated.add_nodes(1)
    operated.add_inference(2, replicas=0)
    process = operated.start_operator()
    operated.submit("llama", 8, 16)
    eventually(lambda: operated.held("llama") == 16, what="it runs on its own node and a lent one")
    operated.cluster.delete(ELASTIC_JOB, "llama", operated.namespace)
    eventually(lambda: operated.find("llama") is None, what="it is gone")
    process.terminate()
    assert process.wait(timeout=60) == 0
    text = (operated.folder / "operator-0.log").read_text()
    assert "forbidden" not in text.lower()
