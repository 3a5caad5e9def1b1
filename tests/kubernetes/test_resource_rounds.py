"""Reconcile rounds against the real API server: writes are neither pruned, rejected nor echoed as user changes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.events import Event, EventCode
from scheduler.domain.job import Progress
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import (
    ELASTIC_JOB,
    EVENT,
    GPU_PRODUCT_LABEL,
    GPU_PROFILE,
    LOAN,
    NODE,
    POOL,
    QUEUE,
    ResourceKind,
)
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.event_recorder import EventSeriesLog, build_event_writes, index_event_objects
from scheduler.kubernetes.resource_writes import Writes
from scheduler.kubernetes.resources.gpu_profile import build_gpu_profile
from scheduler.kubernetes.spec_commands import ClusterResources
from scheduler.solver.profiles.catalog import read_gpu_json
from scheduler.store.protocol import StoredEvent
from tests.builders import a_job, a_loan
from tests.kubernetes.control_plane import ASSETS, ControlPlane
from tests.kubernetes.custom_resources import carry_out, install
from tests.unit.kubernetes import operator_rig
from tests.unit.kubernetes.operator_rig import OperatorRig

LISTED = (POOL, QUEUE, LOAN, NODE, GPU_PROFILE)
"""Kinds in the order of the fields of ClusterResources, after ElasticJobs."""
PRODUCT = "NVIDIA-A100-SXM4-80GB"


class RealServer:
    """A server like FakeServer: returns all objects of ours and executes writes. ElasticJobs of one namespace only."""

    def __init__(self, cluster: KubernetesClient, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def add(self, kind: ResourceKind, name: str, spec: object, **labels: str) -> dict[str, Any]:
        namespace = {"namespace": self.namespace} if kind.is_namespaced else {}
        metadata = {"name": name, "labels": labels, **namespace}
        return self.cluster.create(
            kind, {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "spec": spec}
        )

    def add_node(self, name: str, **labels: str) -> None:
        self.add(NODE, name, {}, **labels, **{GPU_PRODUCT_LABEL: PRODUCT})
        resources = {"nvidia.com/gpu": "8"}
        self.cluster.patch_status(NODE, name, change={"status": {"capacity": resources, "allocatable": resources}})

    def resources(self) -> ClusterResources:
        jobs = self.cluster.list(ELASTIC_JOB, namespace=self.namespace).items
        return ClusterResources(jobs, *(self.cluster.list(kind).items for kind in LISTED))

    def execute(self, every: Iterable[Writes]) -> None:
        carry_out(self.cluster, every)


@pytest.fixture
def rig(cluster: KubernetesClient, namespace: str, monkeypatch: pytest.MonkeyPatch) -> OperatorRig:
    """A rig with two Pools of one node each."""
    install(cluster)
    monkeypatch.setattr(operator_rig, "NAMESPACE", namespace)
    server = RealServer(cluster, namespace)
    server.add(POOL, "training", {"kind": "training", "nodeSelector": {"role": "train"}})
    server.add(POOL, "inference", {"kind": "inference", "nodeSelector": {"role": "serve"}})
    server.add_node("t0", role="train")
    server.add_node("i0", role="serve")
    created = OperatorRig(server=server)  # type: ignore[arg-type]  # it does what OperatorRig asks of a server
    created.run_until_stable()
    return created


@pytest.fixture
def get(control_plane: ControlPlane, namespace: str) -> Any:
    """Return the output of `kubectl get` as rows of columns."""
    program = shutil.which("kubectl", path=str(ASSETS)) or shutil.which("kubectl")
    if program is None:
        pytest.skip(f"no kubectl in {ASSETS} or on the path")

    def run(*what: str) -> list[list[str]]:
        command = [program, "--kubeconfig", str(control_plane.admin_kubeconfig), "-n", namespace, "get", *what]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]

    return run


def with_a_running_job(rig: OperatorRig) -> None:
    """Add job `llama-abc123`, submitted over HTTP, on its own node and a lent one."""
    now_s = rig.snapshot.now_s
    job = a_job("llama-abc123", 2, 8, state=JobState.RUNNING, on={"t0": (0, 1), "i0": (0, 1, 2, 3)}, now_s=now_s)
    job = replace(job, progress=Progress(at_s=now_s, steps=900.0, loss=2.5))
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job}, loans={"i0": a_loan("i0")})
    rig.run_until_stable()


def test_nodes_join_and_writes_are_stable(rig: OperatorRig) -> None:
    assert {node.name: node.pool for node in rig.snapshot.nodes.values()} == {"t0": "training", "i0": "inference"}
    assert rig.compute_commands().commands == ()
    assert rig.compute_writes() == ()


def test_a_gpu_profile_is_followed_and_reported(rig: OperatorRig, get: Any) -> None:
    assert isinstance(rig.server, RealServer)
    text = read_gpu_json("a100-80g")
    rig.server.add(GPU_PROFILE, "a100-80g", build_gpu_profile("a100-80g", json.loads(text))["spec"])
    rig.run_until_stable()
    assert json.loads(rig.snapshot.gpu_profiles["a100-80g"].profile_json) == json.loads(text)
    resource = rig.server.cluster.get(GPU_PROFILE, "a100-80g")
    assert (resource["status"]["version"], resource["status"]["appliedGeneration"]) == (1, 1)
    assert get("gpuprofiles")[1][:4] == ["a100-80g", "True", "1", "2"]
    rig.server.cluster.patch(GPU_PROFILE, "a100-80g", change={"spec": {"efficiency": 7}})
    rig.run_until_stable()
    status = rig.server.cluster.get(GPU_PROFILE, "a100-80g")["status"]
    assert (status["observedGeneration"], status["appliedGeneration"]) == (2, 1)
    assert status["conditions"][0]["status"] == "False"
    assert "efficiency is 7" in status["conditions"][0]["message"]
    rig.server.cluster.delete(GPU_PROFILE, "a100-80g")
    rig.run_until_stable()
    assert (rig.snapshot.gpu_profiles, rig.server.cluster.list(GPU_PROFILE).items) == ({}, ())


def test_a_gpu_profile_without_a_figure_is_refused_by_the_api_server(rig: OperatorRig) -> None:
    assert isinstance(rig.server, RealServer)
    with pytest.raises(ApiError, match=r"spec\.memoryBytes"):
        rig.server.add(GPU_PROFILE, "mine", {"efficiency": 0.5})


def test_kubectl_columns_of_job_and_loan(rig: OperatorRig, get: Any) -> None:
    with_a_running_job(rig)
    head, job = get("ej")
    assert head == ["NAME", "STATE", "GPUS", "QUEUE", "PRIORITY", "PROGRESS %", "REASON", "AGE"]
    assert job[:6] == ["llama-abc123", "Running", "6/8", "default", "0", "25"]
    assert "dp6" in " ".join(get("ej", "-o", "wide")[1])
    assert get("loans")[1][:3] == ["i0-1", "i0", "inference"]
    assert "active" in get("loans")[1]
    assert get("pools")[1][:5] == ["inference", "inference", "1", "8", "1"]


def test_kubectl_and_http_jobs_have_equal_statuses(rig: OperatorRig, get: Any) -> None:
    with_a_running_job(rig)
    rig.server.add(ELASTIC_JOB, "mine", {"gpus": {"min": 4, "max": 4}, "command": ["x"]})
    rig.run_until_stable()
    (mine,) = (job for job in rig.snapshot.jobs.values() if job.spec.name == "mine")
    assert mine.spec.namespace == operator_rig.NAMESPACE
    waits = Reason(ReasonCode.INSUFFICIENT_GPUS, "needs 4 GPUs, 2 are free")
    rig.write(waiting_reasons={mine.id: waits})
    assert [row[0] for row in get("ej")] == ["NAME", "llama-abc123", "mine"]
    assert get("ej")[2][1:6] == ["Submitted", "0/4", "default", "0", "InsufficientGpus"]


def test_changes_flow_both_ways(rig: OperatorRig) -> None:
    with_a_running_job(rig)
    job = rig.snapshot.jobs["llama-abc123"]
    scaled = replace(job, spec=replace(job.spec, max_gpus=16))
    rig.snapshot = replace(rig.snapshot, jobs={job.id: scaled})
    rig.run_until_stable()
    assert isinstance(rig.server, RealServer)
    resource = rig.server.cluster.get(ELASTIC_JOB, job.id, rig.server.namespace)
    assert (resource["spec"]["gpus"]["max"], resource["status"]["observedGeneration"]) == (16, 2)
    change = {"spec": {"gpus": {"max": 6}}}
    rig.server.cluster.patch(ELASTIC_JOB, job.id, rig.server.namespace, change=change)
    rig.run_until_stable()
    assert rig.snapshot.jobs[job.id].spec.max_gpus == 6


def test_labels_flow_both_ways(rig: OperatorRig, get: Any) -> None:
    assert isinstance(rig.server, RealServer)
    rig.server.add(ELASTIC_JOB, "mine", {"gpus": {"min": 1, "max": 1}, "command": ["x"]}, team="vision", tier="dev")
    rig.run_until_stable()
    (job,) = rig.snapshot.jobs.values()
    assert job.spec.labels == {"team": "vision", "tier": "dev"}
    change = {"metadata": {"labels": {"tier": None, "stage": "tune"}}}
    rig.server.cluster.patch(ELASTIC_JOB, "mine", rig.server.namespace, change=change)
    assert rig.run_round() == ["ChangeJob"]
    rig.run_until_stable()
    job = rig.snapshot.jobs[job.id]
    assert job.spec.labels == {"stage": "tune", "team": "vision"}
    changed = replace(job, spec=replace(job.spec, labels={"team": "speech"}))
    rig.snapshot = replace(rig.snapshot, jobs={job.id: changed})
    rig.run_until_stable()
    assert rig.snapshot.jobs[job.id].spec.labels == {"team": "speech"}
    assert [row[0] for row in get("ej", "-l", "team=speech,!stage")] == ["NAME", "mine"]


def test_deleted_resource_is_removed_after_its_job(rig: OperatorRig) -> None:
    with_a_running_job(rig)
    assert isinstance(rig.server, RealServer)
    rig.server.cluster.delete(ELASTIC_JOB, "llama-abc123", rig.server.namespace)
    assert rig.run_round() == ["CancelJob"]
    assert rig.server.resources().elastic_jobs
    rig.snapshot = replace(rig.snapshot, jobs={})
    rig.write()
    assert rig.server.resources().elastic_jobs == ()


def test_events_are_accepted_and_counted(rig: OperatorRig, get: Any) -> None:
    with_a_running_job(rig)
    assert isinstance(rig.server, RealServer)
    known = index_event_objects(rig.server.resources(), rig.snapshot, job_namespace=rig.server.namespace)
    now_s = rig.snapshot.now_s
    reported = [
        StoredEvent(at, 1, Event(now_s + at, EventCode.JOB_GROWN, "llama-abc123", "to 6 GPUs")) for at in range(3)
    ]
    lent = StoredEvent(9, 1, Event(now_s, EventCode.NODE_LENT, "i0", "idle"))
    log, steps = build_event_writes(EventSeriesLog(), [reported[0], lent], known, reporting_instance="operator-0")
    rig.server.execute(steps)
    _, steps = build_event_writes(log, reported[1:], known, reporting_instance="operator-0")
    rig.server.execute(steps)
    (event,) = rig.server.cluster.list(EVENT, namespace=rig.server.namespace).items
    assert (event["reason"], event["series"]["count"]) == ("JobGrown", 3)
