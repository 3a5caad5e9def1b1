"""Invariants of all rendered manifests, for every set of values. Reads the golden renderings, without Helm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest

from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.telemetry.traces import is_tracing_enabled
from tests.chart import manifests
from tests.chart.manifests import Manifest, named, pod_specs, read

VERSION = "1.33"
CUSTOM = ("ServiceMonitor", "PrometheusRule", "HTTPRoute")
CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding")
FLEET = {"pools", "queues", "loans"}
READING = {"get", "list", "watch"}

pytestmark = pytest.mark.parametrize("case", manifests.CASES)


def containers(spec: Manifest) -> Iterator[Manifest]:
    yield from spec.get("initContainers", ())
    yield from spec["containers"]


def rules(case: str) -> Iterator[tuple[str, Manifest]]:
    for each in read(case):
        if each["kind"] in ("Role", "ClusterRole"):
            yield from ((each["metadata"]["name"], rule) for rule in each["rules"])


def test_manifests_are_valid_for_kubernetes(case: str) -> None:
    for each in read(case):
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, VERSION, strict=True)
        assert ("namespace" in each["metadata"]) <= (each["kind"] not in CLUSTER_WIDE)


def test_pods_meet_the_restricted_security_standard(case: str) -> None:
    """Pods also have a read-only root file system."""
    seen = 0
    for name, spec in pod_specs(read(case)):
        security = spec["securityContext"]
        assert security["runAsNonRoot"], name
        assert security["runAsUser"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "configMap", "secret", "projected", "persistentVolumeClaim"}, name
        for container in containers(spec):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["readOnlyRootFilesystem"], name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"].keys() == {"requests", "limits"}, name
            seen += 1
    assert seen >= 5


def test_pods_avoid_lent_nodes(case: str) -> None:
    for name, spec in pod_specs(read(case)):
        affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        wanted = {"key": "ebbtide.dev/loan", "operator": "DoesNotExist"}
        assert [term["matchExpressions"] for term in affinity["nodeSelectorTerms"]] == [[wanted]], name
        assert all(each.get("key") for each in spec.get("tolerations", ())), name


def test_only_the_operator_and_the_uninstallation_have_a_service_account_token(case: str) -> None:
    created = read(case)
    assert not any(each["automountServiceAccountToken"] for each in created if each["kind"] == "ServiceAccount")
    for name, spec in pod_specs(created):
        assert spec["automountServiceAccountToken"] is False, name
        accounts = {volume["name"] for volume in spec["volumes"] if "projected" in volume}
        for container in containers(spec):
            has_account = bool(accounts & {mount["name"] for mount in container["volumeMounts"]})
            assert has_account == (container["name"] in ("operator", "uninstall")), (name, container["name"])
    bindings = [each for each in created if each["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    uninstall = set() if case == "nothing" else {"ebbtide-uninstall"}
    assert {subject["name"] for each in bindings for subject in each["subjects"]} == {"ebbtide-operator"} | uninstall


def test_roles_have_no_wildcards_and_read_no_secrets(case: str) -> None:
    for name, rule in rules(case):
        assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}, name
        assert "nonResourceURLs" not in rule, name
        if "secrets" in rule["resources"]:
            assert not READING & set(rule["verbs"]), name
        assert rule["apiGroups"] != ["rbac.authorization.k8s.io"], name


def test_user_roles_cannot_write_cluster_scoped_resources(case: str) -> None:
    for name, rule in rules(case):
        if not name.endswith(("-operator", "-uninstall")) and FLEET & set(rule["resources"]):
            assert set(rule["verbs"]) <= READING, name


def test_selectors_match_pods(case: str) -> None:
    created = read(case)
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in created if each["kind"] == "Deployment"]
    for each in created:
        selector = _selector(each)
        if selector is not None:
            assert any(selector.items() <= own.items() for own in labels), (each["kind"], each["metadata"]["name"])


def _selector(each: Manifest) -> dict[str, str] | None:
    spec: dict[str, Any] = each.get("spec") or {}
    match each["kind"]:
        case "Service":
            return dict(spec["selector"])
        case "NetworkPolicy":
            labels: dict[str, str] | None = spec["podSelector"].get("matchLabels")
            return labels  # None for pods of jobs, which are not in the chart
        case "PodDisruptionBudget":
            return dict(spec["selector"]["matchLabels"])
    return None


def test_service_monitors_match_services(case: str) -> None:
    created = read(case)
    for monitor in (each for each in created if each["kind"] == "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [
            each for each in created if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
        ]
        assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_services_target_open_ports(case: str) -> None:
    created = read(case)
    deployments = [each["spec"]["template"] for each in created if each["kind"] == "Deployment"]
    for each in created:
        if each["kind"] != "Service":
            continue
        selector = each["spec"]["selector"].items()
        (pod,) = [pod for pod in deployments if selector <= pod["metadata"]["labels"].items()]
        opened = {port["name"] for part in pod["spec"]["containers"] for port in part.get("ports", ())}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= opened


def test_settings_are_valid(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in named(read(case), "ConfigMap", "ebbtide")["data"].items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    load_policy_set(settings.policy)
    assert (settings.host, settings.port, settings.log_format) == ("0.0.0.0", 8787, "json")
    assert str(settings.token_secret_path) == "/run/token/token.secret"


def test_settings_point_to_the_services(case: str) -> None:
    created = read(case)
    settings = named(created, "ConfigMap", "ebbtide")["data"]
    services = {
        each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in created if each["kind"] == "Service"
    }
    host = f"ebbtide-api.{manifests.NAMESPACE}.svc"
    assert settings["EBBTIDE_PUBLIC_URL"] == f"http://{host}:{services['ebbtide-api']}"


def test_api_memory_limit_fits_simulations(case: str) -> None:
    created = read(case)
    simulation_bytes = int(named(created, "ConfigMap", "ebbtide")["data"]["EBBTIDE_SIMULATION_MEMORY_BYTES"])
    limits = [
        container["resources"]["limits"]["memory"]
        for _, spec in pod_specs(created) for container in spec["containers"] if container["name"] == "api"
    ]  # fmt: skip
    assert limits == ["2Gi"]
    assert 2 * simulation_bytes <= 2 * 2**30


def test_only_api_and_operator_send_traces_if_configured(case: str) -> None:
    environments = {
        container["name"]: {each["name"]: each.get("value", "") for each in container.get("env", ())}
        for _, spec in pod_specs(read(case)) for container in containers(spec)
    }  # fmt: skip
    traced = {name for name, environment in environments.items() if is_tracing_enabled(environment)}
    assert traced == ({"api", "operator"} if case == "everything" else set())
    for name in traced:
        service, attributes = (
            environments[name]["OTEL_SERVICE_NAME"],
            environments[name]["OTEL_RESOURCE_ATTRIBUTES"].split(","),
        )
        assert service == f"ebbtide-{name}"
        assert dict(each.split("=") for each in attributes) == {
            "k8s.namespace.name": manifests.NAMESPACE,
            "k8s.pod.name": "$(POD_NAME)",
            "deployment.environment.name": "production",
        }
        assert list(environments[name]).index("POD_NAME") < list(environments[name]).index("OTEL_RESOURCE_ATTRIBUTES")
    assert all("OTEL" not in " ".join(environment) for name, environment in environments.items() if name not in traced)


def test_only_the_operator_gets_the_prometheus_url(case: str) -> None:
    environments = {
        container["name"]: each["valueFrom"]["secretKeyRef"]
        for _, spec in pod_specs(read(case))
        for container in containers(spec)
        for each in container.get("env", ())
        if each["name"] == "EBBTIDE_PROMETHEUS_URL"
    }
    assert environments == ({"operator": {"name": "prometheus", "key": "url"}} if case == "everything" else {})


def test_only_the_api_mounts_the_webhook_authorities(case: str) -> None:
    for _, spec in pod_specs(read(case)):
        for container in containers(spec):
            environment = {each["name"]: each.get("value", "") for each in container.get("env", ())}
            path = environment.get("EBBTIDE_WEBHOOK_CA_FILE")
            assert (path is not None) == (case == "everything" and container["name"] == "api")
            if path is not None:
                (volume,) = [each for each in spec["volumes"] if "configMap" in each]
                (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
                assert path == f"{mount['mountPath']}/{volume['configMap']['items'][0]['path']}"


def test_uninstallation_has_fewer_permissions_than_the_operator(case: str) -> None:
    granted: dict[str, set[tuple[str, str, str]]] = {"-operator": set(), "-uninstall": set()}
    for name, rule in rules(case):
        for suffix, verbs in granted.items():
            if name.endswith(suffix):
                verbs |= {
                    (group, resource, verb)
                    for group in rule["apiGroups"] for resource in rule["resources"] for verb in rule["verbs"]
                }  # fmt: skip
    assert granted["-uninstall"] <= granted["-operator"]
    may_delete = ("", "pods", "delete") in granted["-uninstall"]
    assert may_delete == (case == "everything"), "pods are deleted with uninstall.stopJobs only"


def test_pods_have_the_fields_of_all_pods(case: str) -> None:
    for each in read(case):
        template = each.get("spec", {}).get("template", {})
        if "spec" not in template:
            continue
        is_full, name = case == "everything", each["metadata"]["name"]
        assert template["spec"].get("priorityClassName") == ("system-cluster-critical" if is_full else None), name
        assert ("team" in template["metadata"]["labels"]) == is_full, name
        assert ("sidecar.istio.io/inject" in template["metadata"].get("annotations", {})) == is_full, name
        own = {container["name"]: container for container in template["spec"]["containers"]}
        proxied = {
            container for container, fields in own.items()
            if "HTTPS_PROXY" in {variable["name"] for variable in fields.get("env", ())}
        }  # fmt: skip
        assert proxied == ({*own} - {"metrics"} if is_full else set()), name


def test_routes_lead_to_the_api(case: str) -> None:
    created = read(case)
    routes = {each["kind"]: each["spec"] for each in created if each["kind"] in ("Ingress", "HTTPRoute")}
    assert set(routes) == ({"Ingress", "HTTPRoute"} if case == "everything" else set())
    if not routes:
        return
    (port,) = named(created, "Service", "ebbtide-api")["spec"]["ports"]
    (path,) = routes["Ingress"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "ebbtide-api", "port": {"name": port["name"]}}
    (backend,) = routes["HTTPRoute"]["rules"][0]["backendRefs"]
    assert backend == {"name": "ebbtide-api", "port": port["port"]}
    assert routes["Ingress"]["tls"][0]["hosts"] == [routes["Ingress"]["rules"][0]["host"]]
