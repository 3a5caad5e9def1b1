"""The custom resource definitions on a real API server: validation, immutability and kubectl output."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import ELASTIC_JOB, LOAN, POOL, QUEUE, ResourceKind
from scheduler.kubernetes.client import KubernetesClient
from tests.kubernetes.control_plane import ASSETS, ControlPlane

JOB = {"gpus": {"min": 2, "max": 8}, "command": ["python", "train.py"]}
ARCHIVE = f"sha256:{'0' * 64}"
CLAIM = {"persistentVolumeClaim": {"claimName": "shared"}}
ASKED = {"model": "llama-3-8b", "preset": "vllm"}
OWN = {"model": "llama-3-8b", "rate": "x", "promptLengths": "y", "outputLengths": "z", "correlation": 0.25}
QUERIES = [
    {"promql": "gpus"},
    {"promql": "nodes", "unit": "nodes", "gpusPerNode": 8, "aggregate": "sum"},
    {"preset": "vllm", "selector": {"model_name": "chat"}, "gpusPerReplica": 8, "requestsPerReplica": 256},
    {"preset": "kserve", "gpusPerReplica": 0.5, "replicasMin": 0},
]
LENDS = {"kind": "inference", "nodeSelector": {"role": "serve"}}
SERVES = {
    **LENDS,
    "serving": [{"model": "llama-3-8b", "gpu": "h100-80g", "objective": {"ttft": "1s", "tpot": "50ms"}}],
}
LAUNCH = {"name": "launch", "start": "2026-11-27T08:00:00+01:00", "duration": "3h"}
CONTAINER = {"name": "main", "image": "trainer", "resources": {"limits": {"cpu": 4, "memory": "16Gi"}}}


pytestmark = pytest.mark.usefixtures("definitions")


def resource(kind: ResourceKind, name: str, namespace: str, spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace} if kind.is_namespaced else {"name": name}
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "spec": spec}


def refusal(cluster: KubernetesClient, body: dict[str, Any], kind: ResourceKind) -> str:
    with pytest.raises(ApiError) as refused:
        cluster.create(kind, body)
    assert refused.value.status == 422
    return str(refused.value)


def change_refusal(
    cluster: KubernetesClient, kind: ResourceKind, name: str, namespace: str, spec: dict[str, Any]
) -> str:
    with pytest.raises(ApiError) as refused:
        cluster.patch(kind, name, namespace, change={"spec": spec})
    assert refused.value.status == 422
    return str(refused.value)


@pytest.mark.parametrize(
    "spec",
    [
        JOB,
        {**JOB, "suspend": True, "managedBy": "kueue.x-k8s.io/multikueue", "name": "other"},
        {**JOB, "model": "llama-2-7b", "globalBatch": 64, "sequenceLength": 4096, "steps": 10**15},
        {**JOB, "profile": {"layers": [{"flops": 1e12}]}, "globalBatch": 1},
        {**JOB, "speeds": {"a100-80g": 1, "t4": 0.18}},
        {**JOB, "model": "llama-2-7b", "globalBatch": 64, "lengths": {"512": 90, "4096": 10}},
        {**JOB, "model": "gpt2", "globalBatch": 8, "plan": {"without": ["pp"], "max": {"tp": 4}, "uniform": True}},
        {**JOB, "deadline": "5h30m", "durationEstimate": 90, "maxRunTime": "0.5s", "checkpoint": {"interval": "90"}},
        {**JOB, "workdir": {"archive": ARCHIVE}, "setup": ["make"], "venv": ".venv", "launch": "node"},
        {**JOB, "checkpoint": {"volume": CLAIM}},
        {**JOB, "checkpoint": {"dir": "/a/..b", "volume": {**CLAIM, "subPath": "runs/..7"}}},
        {**JOB, "env": {"A_1": "x", "_b": ""}, "fungible": False, "retries": 0, "priority": -1000, "gpu": "h200"},
        {
            "gpus": {"min": 1, "max": 1},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [CONTAINER]}},
        },
    ],
)
def test_valid_jobs_are_accepted(cluster: KubernetesClient, namespace: str, spec: dict[str, Any]) -> None:
    created = cluster.create(ELASTIC_JOB, resource(ELASTIC_JOB, "job", namespace, spec))
    assert created["spec"] == {"suspend": False, "queue": "default", "priority": 0, **spec}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": {"min": 9, "max": 8}}, "spec.gpus.min: Invalid value"),
        ({"gpus": {"min": 0, "max": 8}}, "spec.gpus.min"),
        ({"gpus": {"min": 1}}, "spec.gpus.max: Required"),
        ({"gpus": None}, "spec.gpus: Required"),
        ({"model": "a", "profile": {}, "globalBatch": 1}, "spec.profile: Invalid value"),
        ({"model": "gpt2"}, "spec.globalBatch: Invalid value"),
        ({"model": "gpt2", "globalBatch": 1, "speeds": {"t4": 1}}, "spec.speeds: Invalid value"),
        ({"speeds": {"t4": 0}}, "spec.speeds.t4: Invalid value"),
        ({"lengths": {"512": 1}}, "spec.lengths: Invalid value"),
        ({"model": "gpt2", "globalBatch": 1, "lengths": {}}, "spec.lengths: Invalid value"),
        ({"model": "gpt2", "globalBatch": 1, "lengths": {"512": 0}}, "spec.lengths.512: Invalid value"),
        ({"model": "gpt2", "globalBatch": 1, "lengths": {"0": 1}}, "spec.lengths: Invalid value"),
        ({"plan": {"uniform": True}}, "spec.plan: Invalid value"),
        ({"model": "gpt2", "globalBatch": 1, "plan": {"simplicity": 2}}, "spec.plan.simplicity: Invalid value"),
        ({"speeds": {"t4": "fast"}}, "spec.speeds.t4: Invalid value"),
        ({"command": None}, "spec.command: Invalid value"),
        ({"workdir": {}}, "spec.workdir.archive: Required"),
        ({"workdir": {"archive": "sha256:1"}}, "spec.workdir.archive: Invalid value"),
        ({"setup": ["make"]}, "spec.setup: Invalid value"),
        ({"venv": ".venv"}, "spec.venv: Invalid value"),
        ({"venv": "/a/../b"}, "spec.venv: Invalid value"),
        ({"launch": "pod"}, "spec.launch: Unsupported value"),
        ({"onResize": "maybe"}, "spec.onResize: Unsupported value"),
        ({"env": {"1A": "x"}}, "spec.env: Invalid value"),
        ({"env": {"EBBTIDE_X": "x"}}, "spec.env: Invalid value"),
        ({"env": {"RANK": "x"}}, "spec.env: Invalid value"),
        ({"deadline": "soon"}, "spec.deadline"),
        ({"deadline": 0}, "spec.deadline"),
        ({"checkpoint": {"keep": 0}}, "spec.checkpoint.keep"),
        ({"checkpoint": {"volume": {}}}, "spec.checkpoint.volume.persistentVolumeClaim: Required"),
        ({"checkpoint": {"volume": {"nfs": {"path": "/"}}}}, "spec.checkpoint.volume.persistentVolumeClaim: Required"),
        ({"checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "No"}}}}, "persistentVolumeClaim.claimName"),
        ({"checkpoint": {"volume": {**CLAIM, "subPath": "/a"}}}, "subPath: Invalid value"),
        ({"checkpoint": {"volume": {**CLAIM, "subPath": "a/.."}}}, "subPath: Invalid value"),
        ({"checkpoint": {"dir": "saved", "volume": CLAIM}}, "spec.checkpoint.dir: Invalid value"),
        ({"checkpoint": {"dir": "/etc/ebbtide/", "volume": CLAIM}}, "spec.checkpoint.dir: Invalid value"),
        ({"queue": "Rich"}, "spec.queue"),
        ({"priority": 1001}, "spec.priority"),
        ({"template": {"spec": {}}}, "spec.template.spec.containers: Required"),
        (
            {"template": {"spec": {"containers": [{"resources": {"requests": {"nvidia.com/gpu": 4}}}]}}},
            "spec.template.spec.containers[0].resources.requests: Invalid value",
        ),
    ],
)
def test_invalid_job_is_rejected_with_its_field(
    cluster: KubernetesClient, namespace: str, change: dict[str, Any], words: str
) -> None:
    spec = {name: value for name, value in {**JOB, **change}.items() if value is not None}
    assert words in refusal(cluster, resource(ELASTIC_JOB, "job", namespace, spec), ELASTIC_JOB)


@pytest.mark.parametrize("name", ["a" * 53, "a.b"])
def test_invalid_job_name_is_rejected(cluster: KubernetesClient, namespace: str, name: str) -> None:
    assert "metadata.name" in refusal(cluster, resource(ELASTIC_JOB, name, namespace, JOB), ELASTIC_JOB)


WHOLE: dict[str, Any] = {
    "gpus": {"min": 2, "max": 8},
    "managedBy": "",
    "model": "gpt2",
    "globalBatch": 8,
    "sequenceLength": 128,
    "steps": 9,
    "retries": 1,
    "gpu": "t4",
    "command": ["x"],
    "workdir": {"archive": ARCHIVE},
    "setup": ["make"],
    "venv": "/venv",
    "image": "i",
    "env": {"A": "1"},
    "checkpoint": {"dir": "/a"},
    "fungible": True,
    "durationEstimate": 1,
    "deadline": 5,
    "maxRunTime": "5m",
    "template": {"spec": {"containers": [CONTAINER]}},
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("name", "other"), ("managedBy", "else"), ("queue", "rich"), ("priority", 1), ("gpu", "l40s")],
        *[("model", "bert-large"), ("model", None), ("globalBatch", 16), ("sequenceLength", 256), ("steps", 10)],
        *[("durationEstimate", 2), ("deadline", "6s"), ("deadline", None), ("maxRunTime", 7), ("retries", 2)],
        *[
            ("command", ["y"]),
            ("launch", "node"),
            ("onResize", "never"),
            ("workdir", {"archive": f"sha256:{'1' * 64}"}),
            ("setup", ["make", "all"]),
            ("venv", "/other"),
            ("image", "j"),
            ("env", {"A": "2"}),
            ("checkpoint", {"dir": "/b"}),
            ("checkpoint", {"volume": CLAIM}),
            ("fungible", False),
        ],
        ("template", {"metadata": {"labels": {"a": "b"}}}),
    ],
)
def test_job_fields_are_immutable(cluster: KubernetesClient, namespace: str, field: str, value: object) -> None:
    cluster.create(ELASTIC_JOB, resource(ELASTIC_JOB, "job", namespace, WHOLE))
    said = change_refusal(cluster, ELASTIC_JOB, "job", namespace, {field: value})
    assert f"spec.{field}: Invalid value" in said


@pytest.mark.parametrize("speeds", [{"t4": 0.3}, None])
def test_speeds_are_immutable(cluster: KubernetesClient, namespace: str, speeds: dict[str, float] | None) -> None:
    cluster.create(ELASTIC_JOB, resource(ELASTIC_JOB, "job", namespace, {**JOB, "speeds": {"t4": 0.2, "l40s": 1}}))
    said = change_refusal(cluster, ELASTIC_JOB, "job", namespace, {"speeds": speeds})
    assert "spec.speeds: Invalid value" in said


def test_range_and_suspend_are_mutable(cluster: KubernetesClient, namespace: str) -> None:
    cluster.create(ELASTIC_JOB, resource(ELASTIC_JOB, "job", namespace, WHOLE))
    change = {"gpus": {"min": 1, "max": 16}, "suspend": True}
    changed = cluster.patch(ELASTIC_JOB, "job", namespace, change={"spec": change})
    assert changed["metadata"]["generation"] == 2


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "training", "nodeSelector": {"a": "b"}, "gpu": "a100-80g", "gpuMemory": "80GiB"},
        {**LENDS, "lending": {"enabled": True, "quantile": 0.999, "headroom": 0, "maxLentNodes": 3, "minLoan": "1h"}},
        {**LENDS, "lending": {"blackouts": [{"start": "22h", "end": 3600}]}, "demand": {"source": "push"}},
        {**LENDS, "lending": {"timeZone": "Asia/Kolkata", "blackouts": [{"cron": "0 8 * * 1-5", "duration": "10h"}]}},
        {**LENDS, "lending": {"knownEvents": [{**LAUNCH, "gpus": 64}], "demandProfile": [1.5] * 168}},
        {**LENDS, "demand": {"source": "deployments", "selector": {"app": "chat"}, "staleAfter": "2m"}},
        {**LENDS, "demand": {"source": "prometheus", "query": "sum(gpus)"}},
        {**LENDS, "demand": {"source": "prometheus", "queries": QUERIES, "staleAfter": "5m", "lostAfter": "1h"}},
        {**SERVES, "demand": {"source": "requests", "requests": [ASKED]}},
        {
            **SERVES,
            "demand": {"source": "requests", "requests": [{**ASKED, "selector": {"a": "b"}, "window": "2m"}]},
        },
        {**SERVES, "demand": {"source": "requests", "requests": [OWN]}},
        {**LENDS, "tolerations": [{"key": "dedicated", "value": "serving"}, {"operator": "Exists"}]},
    ],
)
def test_valid_pools_are_accepted(cluster: KubernetesClient, spec: dict[str, Any]) -> None:
    assert cluster.create(POOL, resource(POOL, "pool", "", spec))["spec"] == spec


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "idle", "nodeSelector": {"a": "b"}}, "spec.kind"),
        ({"kind": "training", "nodeSelector": {}}, "spec.nodeSelector"),
        ({"kind": "training"}, "spec.nodeSelector: Required"),
        (
            {"kind": "training", "nodeSelector": {"a": "b"}, "lending": {}},
            "spec.lending: Invalid value",
        ),
        (
            {"kind": "training", "nodeSelector": {"a": "b"}, "demand": {"source": "push"}},
            "spec.demand: Invalid value",
        ),
        ({**LENDS, "gpuMemory": "much"}, "spec.gpuMemory"),
        ({**LENDS, "lending": {"quantile": 1}}, "spec.lending.quantile"),
        ({**LENDS, "lending": {"headroom": 1}}, "spec.lending.headroom"),
        ({**LENDS, "lending": {"maxLentNodes": -1}}, "spec.lending.maxLentNodes"),
        ({**LENDS, "tolerations": [{"value": "a"}]}, "spec.tolerations[0].key: Invalid value"),
        (
            {**LENDS, "tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
            "spec.tolerations[0].value: Invalid value",
        ),
        ({**LENDS, "demand": {"source": "deployments"}}, "spec.demand.selector: Invalid value"),
        ({**LENDS, "demand": {"source": "prometheus"}}, "spec.demand.query: Invalid value"),
        ({**LENDS, "demand": {"source": "push", "query": "x"}}, "spec.demand.query: Invalid value"),
        ({**SERVES, "demand": {"source": "requests"}}, "spec.demand.requests: Invalid value"),
        ({**LENDS, "demand": {"source": "push", "queries": QUERIES}}, "spec.demand.queries: Invalid value"),
        (
            {**LENDS, "demand": {"source": "prometheus", "query": "x", "queries": QUERIES}},
            "spec.demand.query: Invalid value",
        ),
        *(
            ({**LENDS, "demand": {"source": "prometheus", "queries": [query]}}, f"spec.demand.queries[0].{field}")
            for query, field in (
                ({}, "promql"),
                ({"promql": "x", "unit": "nodes"}, "gpusPerNode"),
                ({"promql": "x", "gpusPerReplica": 2}, "gpusPerReplica"),
                ({"preset": "vllm", "gpusPerReplica": 2}, "requestsPerReplica"),
                ({"promql": "x", "selector": {"a": "b"}}, "selector"),
                ({"preset": "kserve", "gpusPerReplica": 2, "aggregate": "sum"}, "unit"),
                ({"preset": "nim", "gpusPerReplica": 2, "requestsPerReplica": 8}, "preset"),
            )
        ),
        *(
            ({**SERVES, "demand": {"source": "requests", "requests": [asked]}}, f"spec.demand{field}")
            for asked, field in (
                ({"model": "llama-3-8b"}, ".requests[0].rate"),
                ({**ASKED, "rate": "x"}, ".requests[0].rate"),
                ({**ASKED, "preset": "kserve"}, ".requests[0].preset"),
                ({**ASKED, "correlation": 2}, ".requests[0].correlation"),
                ({**OWN, "window": "5m"}, ".requests[0].selector"),
                ({"model": "llama-3-8b", "rate": "x", "promptLengths": "y"}, ".requests[0].promptLengths"),
                ({**ASKED, "model": "other"}, ": Invalid value"),
            )
        ),
        ({**LENDS, "demand": {"source": "requests", "requests": [ASKED]}}, "spec.demand: Invalid value"),
        ({**SERVES, "demand": {"source": "push", "requests": [ASKED]}}, "spec.demand.requests: Invalid value"),
        ({**SERVES, "demand": {"source": "prometheus", "query": "x"}}, "spec.serving: Invalid value"),
        (
            {**LENDS, "demand": {"source": "push", "selector": {"a": "b"}}},
            "spec.demand.selector: Invalid value",
        ),
    ],
)
def test_invalid_pool_is_rejected_with_its_field(cluster: KubernetesClient, spec: dict[str, Any], words: str) -> None:
    assert words in refusal(cluster, resource(POOL, "pool", "", spec), POOL)


def test_pool_kind_and_loan_spec_are_immutable(cluster: KubernetesClient) -> None:
    cluster.create(POOL, resource(POOL, "pool", "", LENDS))
    said = change_refusal(cluster, POOL, "pool", "", {"kind": "training"})
    assert "spec.kind: Invalid value" in said
    cluster.create(LOAN, resource(LOAN, "n1-7", "", {"node": "n1", "pool": "pool"}))
    assert "spec: Invalid value" in change_refusal(cluster, LOAN, "n1-7", "", {"node": "n2"})


def test_queue_validation(cluster: KubernetesClient) -> None:
    created = cluster.create(QUEUE, resource(QUEUE, "research", "", {"guaranteed": 8, "limit": 8}))
    assert created["spec"] == {"guaranteed": 8, "limit": 8, "weight": 1, "maxPriority": 100}
    said = refusal(cluster, resource(QUEUE, "poor", "", {"guaranteed": 9, "limit": 8}), QUEUE)
    assert "spec.limit: Invalid value" in said
    assert "spec.weight" in refusal(cluster, resource(QUEUE, "poor", "", {"weight": 0}), QUEUE)


@pytest.fixture
def kubectl(control_plane: ControlPlane) -> Any:
    program = shutil.which("kubectl", path=str(ASSETS)) or shutil.which("kubectl")
    if program is None:
        pytest.skip(f"no kubectl in {ASSETS} or on the path")

    def run(*arguments: str) -> str:
        command = [program, "--kubeconfig", str(control_plane.admin_kubeconfig), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    return run


def test_kubectl_scale_sets_max_gpus(cluster: KubernetesClient, namespace: str, kubectl: Any) -> None:
    cluster.create(ELASTIC_JOB, resource(ELASTIC_JOB, "job", namespace, JOB))
    kubectl("scale", "-n", namespace, "ej/job", "--replicas", "16")
    assert cluster.get(ELASTIC_JOB, "job", namespace)["spec"]["gpus"] == {"min": 2, "max": 16}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        kubectl("scale", "-n", namespace, "ej/job", "--replicas", "1")
    assert "spec.gpus.min" in refused.value.stderr


def test_kubectl_explain(kubectl: Any) -> None:
    assert "Range of GPUs" in kubectl("explain", "elasticjob.spec.gpus")
