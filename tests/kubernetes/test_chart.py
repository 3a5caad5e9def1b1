"""The chart on a real API server: rendering, installation, upgrade, removal and validation."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import CONFIG_MAP, DEPLOYMENT, ELASTIC_JOB, SECRET, ResourceKind
from scheduler.kubernetes.client import KubernetesClient
from tests.chart import helm, manifests
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.custom_resources import DEFINITION, OURS
from tests.kubernetes.objects import NAMESPACE
from tests.kubernetes.releases import JOB, finished_jobs, rendered
from tests.kubernetes.waiting import eventually

pytestmark = helm.needed

CLAIM = ResourceKind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
BINDING = ResourceKind(
    "rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings", is_namespaced=False
)
DEFINITIONS = {f"{kind.plural}.{kind.group}" for kind in OURS}


class Chart:
    """A release of the chart in a namespace."""

    def __init__(self, plane: ControlPlane, cluster: KubernetesClient, namespace: str) -> None:
        self._cluster = cluster
        self._at = (plane.admin_kubeconfig, manifests.RELEASE, namespace)
        self.namespace = namespace

    def install(self, values: dict[str, Any], *, takes_over: bool = True) -> None:
        """Install the chart. `takes_over` adopts definitions that other tests of the session applied."""
        with finished_jobs(self._cluster, self.namespace):
            helm.install(*self._at, values, takes_over=takes_over)

    def upgrade(self, values: dict[str, Any]) -> None:
        with finished_jobs(self._cluster, self.namespace):
            helm.upgrade(*self._at, values)

    def uninstall(self, *, guard_succeeds: bool = True) -> None:
        with finished_jobs(self._cluster, self.namespace, succeed=guard_succeeds):
            helm.uninstall(*self._at)

    def refusal(self, values: dict[str, Any]) -> str:
        with pytest.raises(helm.HelmError) as refused:
            helm.install(*self._at, values)
        return str(refused.value)


@pytest.fixture
def chart(control_plane: ControlPlane, cluster: KubernetesClient) -> Iterator[Chart]:
    """Yield a chart in a fixed namespace, because its name appears in the golden renderings."""
    for name in (manifests.NAMESPACE, manifests.JOB_NAMESPACE):
        if cluster.get_or_none(NAMESPACE, name) is None:
            cluster.create(NAMESPACE, {"metadata": {"name": name}})
    yield Chart(control_plane, cluster, manifests.NAMESPACE)
    for kind in (SECRET, CLAIM):
        for item in cluster.list(kind, namespace=manifests.NAMESPACE).items:
            cluster.delete(kind, item["metadata"]["name"], manifests.NAMESPACE)


FOREIGN_KINDS = (
    ("monitoring.coreos.com", "ServiceMonitor", "servicemonitors"),
    ("monitoring.coreos.com", "PrometheusRule", "prometheusrules"),
    ("gateway.networking.k8s.io", "HTTPRoute", "httproutes"),
)


def _serve_foreign_kinds(cluster: KubernetesClient) -> None:
    """Serve the kinds of the Prometheus operator and of the Gateway API without a schema."""
    for group, kind, plural in FOREIGN_KINDS:
        schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
        version = {"name": "v1", "served": True, "storage": True, "schema": schema}
        names = {"kind": kind, "plural": plural, "singular": kind.lower()}
        spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
        # Names in the groups of Kubernetes need an approval.
        approval = {"api-approved.kubernetes.io": "unapproved, for tests"}
        metadata = {"name": f"{plural}.{group}", "annotations": approval}
        cluster.apply(DEFINITION, {"metadata": metadata, "spec": spec})
        served = ResourceKind(group, "v1", kind, plural)
        eventually(partial(_is_served, cluster, served), what=f"{kind} is served")


def _is_served(cluster: KubernetesClient, kind: ResourceKind) -> bool:
    try:
        cluster.list(kind)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("case", manifests.CASES)
def test_rendering_matches_the_golden_files(chart: Chart, cluster: KubernetesClient, case: str) -> None:
    if case == "everything":
        _serve_foreign_kinds(cluster)
    for name in manifests.CASES[case].get("rbac", {}).get("warmStandbys", ()):
        if cluster.get_or_none(NAMESPACE, name) is None:
            cluster.create(NAMESPACE, {"metadata": {"name": name}})
    chart.install(manifests.CASES[case])
    created = manifests.comparable(rendered(cluster, manifests.RELEASE, chart.namespace))
    chart.uninstall()
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        manifests.write(case, created)
    assert created == manifests.read(case)


def test_user_objects_outlive_the_release(chart: Chart, cluster: KubernetesClient) -> None:
    chart.install(manifests.SQLITE)
    secret = cluster.get(SECRET, "ebbtide-token", chart.namespace)["data"]["token.secret"]
    assert len(base64.b64decode(secret)) == 32
    spec = {"gpus": {"min": 1, "max": 2}, "command": ["true"]}
    eventually(lambda: _is_served(cluster, ELASTIC_JOB), what="ElasticJobs are served")
    cluster.create(ELASTIC_JOB, {"metadata": {"name": "job", "namespace": chart.namespace}, "spec": spec})

    chart.upgrade({**manifests.SQLITE, "settings": {"LOG_LEVEL": "DEBUG"}})
    assert cluster.get(SECRET, "ebbtide-token", chart.namespace)["data"]["token.secret"] == secret
    assert cluster.get(CONFIG_MAP, "ebbtide", chart.namespace)["data"]["EBBTIDE_LOG_LEVEL"] == "DEBUG"

    chart.uninstall()
    assert {name for name in DEFINITIONS if cluster.get_or_none(DEFINITION, name)} == DEFINITIONS
    assert cluster.get_or_none(DEPLOYMENT, "ebbtide-operator", chart.namespace) is None
    assert cluster.get_or_none(BINDING, "ebbtide-operator") is None
    assert cluster.get(ELASTIC_JOB, "job", chart.namespace)["spec"]["gpus"] == {"min": 1, "max": 2}
    assert cluster.get_or_none(CLAIM, "ebbtide-database", chart.namespace) is not None

    chart.install(manifests.SQLITE, takes_over=False)
    assert cluster.get(SECRET, "ebbtide-token", chart.namespace)["data"]["token.secret"] == secret
    assert cluster.get(ELASTIC_JOB, "job", chart.namespace)["spec"]["gpus"] == {"min": 1, "max": 2}
    chart.uninstall()


def test_failing_guard_keeps_the_release(chart: Chart, cluster: KubernetesClient) -> None:
    chart.install(manifests.SQLITE)
    with pytest.raises(helm.HelmError, match="ebbtide-uninstall"):
        chart.uninstall(guard_succeeds=False)
    assert cluster.get_or_none(DEPLOYMENT, "ebbtide-operator", chart.namespace) is not None
    assert cluster.get_or_none(BINDING, "ebbtide-operator") is not None
    assert cluster.get_or_none(JOB, "ebbtide-uninstall", chart.namespace) is not None, "its log says what to do"
    chart.uninstall()
    assert cluster.get_or_none(DEPLOYMENT, "ebbtide-operator", chart.namespace) is None
    assert cluster.get_or_none(JOB, "ebbtide-uninstall", chart.namespace) is None
    assert cluster.get_or_none(BINDING, "ebbtide-uninstall") is None


def test_changed_settings_restart_pods(chart: Chart, cluster: KubernetesClient) -> None:
    def sums() -> list[str]:
        names = ("ebbtide-api", "ebbtide-operator")
        found = [cluster.get(DEPLOYMENT, name, chart.namespace)["spec"]["template"] for name in names]
        return [each["metadata"]["annotations"]["checksum/settings"] for each in found]

    chart.install(manifests.POSTGRESQL)
    before = sums()
    chart.upgrade(manifests.POSTGRESQL)
    assert sums() == before
    chart.upgrade({**manifests.POSTGRESQL, "settings": {"LOG_LEVEL": "DEBUG"}})
    after = sums()
    assert before[0] == before[1] != after[0] == after[1]
    assert not cluster.list(JOB, namespace=chart.namespace).items, "a migration that succeeded is cleared away"
    chart.uninstall()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "database.postgresql.existingSecret"),
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
        ({"api": {"replica": 2}}, "at '/api': additional properties 'replica' not allowed"),
        ({"api": {"replicas": "2"}}, "at '/api/replicas': got string, want integer"),
        (
            {"settings": {"HOST": "::"}},
            "at '/settings': additional properties 'HOST' not allowed",
        ),
        ({"settings": {"LEASE_S": 0}}, "at '/settings/LEASE_S': exclusiveMinimum: got 0, want 0"),
        ({"database": {"kind": "mysql"}}, "at '/database/kind': value must be one of 'postgresql', 'sqlite'"),
        ({"database": {"kind": "sqlite"}}, "at '/operator/replicas': value must be 1"),
        ({**manifests.SQLITE, "api": {"replicas": 2}}, "at '/api/replicas': value must be 1"),
    ],
)
def test_invalid_values_are_rejected_by_name(chart: Chart, values: dict[str, Any], words: str) -> None:
    assert words in chart.refusal(values)
