"""`ebbtide prepare-uninstall` with the account of the chart: nothing is left that only an operator could remove."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.kubernetes.api_objects import (
    CONFIG_MAP,
    ELASTIC_JOB,
    GPU_PROFILE,
    JOB_LABEL,
    LEASE,
    LOAN,
    LOAN_LABEL,
    MANAGED_BY_LABEL,
    NODE,
    POD,
    POOL,
    PREFETCH_LABEL,
    QUEUE,
    SCHEDULER_NAME,
    SECRET,
    SERVICE,
    Object,
    ResourceKind,
    labels_of,
)
from scheduler.kubernetes.client import connect
from scheduler.kubernetes.leader_election import OPERATOR_LEASE
from scheduler.kubernetes.resources.gpu_profile import build_gpu_profile
from scheduler.solver.profiles.catalog import read_gpu_json
from tests.chart import manifests
from tests.kubernetes.conftest import UNHURRIED
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.objects import NAMESPACE, build_pod
from tests.kubernetes.operated import Operated
from tests.kubernetes.test_chart_access import ACCESS
from tests.kubernetes.waiting import eventually

ACCOUNT = "ebbtide-uninstall"


@pytest.fixture
def kubeconfigs(control_plane: ControlPlane, operated: Operated) -> Iterator[dict[bool, Path]]:
    """Yield kubeconfigs of the chart's account, by whether it may stop jobs."""
    admin = connect(control_plane.admin_kubeconfig, limits=UNHURRIED)
    operated.lease_namespace = manifests.NAMESPACE
    if admin.get_or_none(NAMESPACE, manifests.NAMESPACE) is None:
        admin.create(NAMESPACE, {"metadata": {"name": manifests.NAMESPACE}})
    yield {
        stops_jobs: _grant(control_plane, case) for stops_jobs, case in ((True, "everything"), (False, "postgresql"))
    }
    admin.delete(LEASE, OPERATOR_LEASE, manifests.NAMESPACE)
    admin.close()


def _grant(plane: ControlPlane, case: str) -> Path:
    admin = plane.connect()
    name = f"{ACCOUNT}-{case}"
    for kind in ACCESS:
        for each in manifests.read(case):
            if each["kind"] != kind.name or each["metadata"]["name"] != ACCOUNT:
                continue
            place = {"namespace": manifests.NAMESPACE} if kind.is_namespaced else {}
            body = {**each, "metadata": {"name": name, **place}}
            if "roleRef" in body:
                subject = {"kind": "ServiceAccount", "name": name, "namespace": manifests.NAMESPACE}
                body |= {"roleRef": {**body["roleRef"], "name": name}, "subjects": [subject]}
            admin.apply(kind, body)
    admin.close()
    return plane.kubeconfig_of_service_account(name, manifests.NAMESPACE)


def prepare(kubeconfig: Path, *options: str) -> subprocess.CompletedProcess[str]:
    own = {"EBBTIDE_KUBECONFIG": str(kubeconfig), "EBBTIDE_LEASE_NAMESPACE": manifests.NAMESPACE}
    command = [sys.executable, "-m", "cli", "prepare-uninstall", *options]
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=180, check=False)


def hanging_objects(operated: Operated) -> list[Object]:
    """Return objects that could not be deleted without an operator, and nodes that it still marks."""
    cluster = operated.cluster
    objects = [each for kind in (ELASTIC_JOB, POOL, QUEUE, GPU_PROFILE, LOAN) for each in cluster.list(kind).items]
    marked = [each for each in cluster.list(NODE).items if LOAN_LABEL in labels_of(each)]
    return [each for each in objects if each["metadata"].get("finalizers") or each["kind"] == "Loan"] + marked


def _list_job_objects(operated: Operated, kind: ResourceKind) -> tuple[Object, ...]:
    return operated.cluster.list(kind, namespace=operated.namespace, label_selector=JOB_LABEL).items


def test_uninstallation_is_refused_while_a_job_runs(operated: Operated, kubeconfigs: dict[bool, Path]) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    operated.submit("llama", 4, 8)
    operated.until_phase("llama", "Running")
    done = prepare(kubeconfigs[False])
    (pod,) = operated.pods()
    assert done.returncode == 1, done.stderr
    assert f"(pods of jobs: {operated.namespace}/{pod['metadata']['name']})" in done.stderr
    assert "uninstall.stopJobs" in done.stderr
    assert operated.phase("llama") == "Running"
    assert hanging_objects(operated), "an uninstallation that is refused changes nothing"
    operated.cluster.delete(ELASTIC_JOB, "llama", operated.namespace)
    eventually(lambda: operated.find("llama") is None, what="the operator still leads")


def test_jobs_are_stopped_and_nodes_are_returned(operated: Operated, kubeconfigs: dict[bool, Path]) -> None:
    operated.add_nodes(1)
    operated.add_inference(2, replicas=0)
    operated.cluster.apply(QUEUE, {"metadata": {"name": "research"}, "spec": {}})
    operated.cluster.apply(GPU_PROFILE, build_gpu_profile("t4", json.loads(read_gpu_json("t4"))))
    operator = operated.start_operator()
    operated.submit("llama", 8, 16)
    eventually(lambda: operated.lent_nodes() and operated.held("llama") == 16, what="it holds a lent node")
    done = prepare(kubeconfigs[True], "--stop-jobs", "--timeout=120")
    assert done.returncode == 0, done.stderr
    assert operated.pods() == []
    assert operated.lent_nodes() == []
    assert hanging_objects(operated) == []
    assert operated.job("llama")["spec"]["suspend"] is True
    objects = [each for kind in (SERVICE, SECRET, CONFIG_MAP) for each in _list_job_objects(operated, kind)]
    assert all(each["metadata"].get("ownerReferences") for each in objects), "they are deleted with the ElasticJob"
    operator.send_signal(signal.SIGTERM)
    assert operator.wait(timeout=60) == 0
    assert hanging_objects(operated) == [], "an operator that is ending writes nothing"
    for kind, name, namespace in (
        (ELASTIC_JOB, "llama", operated.namespace),
        (POOL, "training", ""),
        (POOL, "inference", ""),
        (QUEUE, "research", ""),
        (GPU_PROFILE, "t4", ""),
    ):
        operated.cluster.delete(kind, name, namespace)
        assert operated.cluster.get_or_none(kind, name, namespace) is None


def test_pods_that_no_operator_stops_are_deleted(operated: Operated, kubeconfigs: dict[bool, Path]) -> None:
    operated.add_nodes(1)
    operator = operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    operator.kill()
    operator.wait()
    labels = {MANAGED_BY_LABEL: SCHEDULER_NAME, PREFETCH_LABEL: "weights"}
    operated.cluster.create(POD, build_pod("prefetch", operated.namespace, labels=labels))
    done = prepare(kubeconfigs[True], "--stop-jobs", "--timeout=1")
    assert done.returncode == 0, done.stderr
    eventually(lambda: not operated.pods(), what="its pods are gone")
    assert operated.cluster.get_or_none(POD, "prefetch", operated.namespace) is None
    assert hanging_objects(operated) == []


def test_unused_cluster_is_released(operated: Operated, kubeconfigs: dict[bool, Path]) -> None:
    done = prepare(kubeconfigs[False])
    assert done.returncode == 0, done.stderr
    assert "Uninstall it within a minute" in done.stdout + done.stderr
