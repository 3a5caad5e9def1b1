"""Golden renderings of the chart for four sets of values.

tests/kubernetes/test_chart.py renders the chart with Helm and compares; EBBTIDE_GOLDEN=write rewrites the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

JOB_NAMESPACE = "training"
FOLDER = Path(__file__).parent / "rendered"
RELEASE, NAMESPACE = "ebbtide", "ebbtide"
POSTGRESQL: Manifest = {
    "database": {"postgresql": {"existingSecret": "ebbtide-database"}},
    "tokenSecret": {"existingSecret": "ebbtide-token"},
}
SQLITE: Manifest = {"database": {"kind": "sqlite"}, "api": {"replicas": 1}, "operator": {"replicas": 1}}
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
ANYWHERE = {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}
EVERYTHING: Manifest = {
    **POSTGRESQL,
    "image": {"repository": "harbour.example/ebbtide", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": ["harbour"],
    "jobImagePullSecrets": ["harbour", "quay"],
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"sidecar.istio.io/inject": "false"},
    "podLabels": {"team": "platform"},
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"},
        {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "aws", "key": "secret"}}},
    ],
    "uninstall": {"stopJobs": True, "timeoutSeconds": 600},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"},
        "hosts": ["ebbtide.example.com"],
        "tls": [{"secretName": "ebbtide-tls", "hosts": ["ebbtide.example.com"]}],
    },
    "httpRoute": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
        "hostnames": ["ebbtide.example.com"],
    },
    "tokenSecret": {"existingSecret": "tokens"},
    "jobNamespace": JOB_NAMESPACE,
    "settings": {"FULL_PASS_PERIOD_S": 60, "LEASE_S": 7.5, "SEASON_S": 604800, "CLUSTER": "east"},
    "api": {"replicas": 3, "serviceType": "LoadBalancer", "nodeSelector": {"role": "system"}},
    "operator": {"tolerations": [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}]},
    "networkPolicy": {
        "apiFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "metricsFrom": [PEER],
        "egress": {
            "webhooks": {"to": [ANYWHERE, PEER], "ports": [443, 8443]},
            "oidc": {"to": [PEER]},
            "tracing": {"to": [PEER]},
        },
    },
    "webhookAuthorities": {"existingConfigMap": "authorities"},
    "prometheus": {"existingSecret": "prometheus"},
    "tracing": {
        "endpoint": "https://collector.tracing.svc:4318",
        "headers": {"existingSecret": "tracing"},
        "sampler": "parentbased_traceidratio",
        "samplerArg": "0.1",
        "resourceAttributes": {"deployment.environment.name": "production"},
    },
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "queueWaitSeconds": 1800},
        "consoleUrl": "https://ebbtide.example.com/",
        "dashboards": {"enabled": True},
    },
}
NOTHING: Manifest = {
    **SQLITE,
    "crds": {"install": False},
    "database": {"kind": "sqlite", "sqlite": {"existingClaim": "old"}},
    "rbac": {"aggregate": False, "scale": [{"apiGroup": "apps", "resource": "deployments"}], "warmStandbys": ["chat"]},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "uninstall": {"guard": False},
}
CASES = {
    "postgresql": POSTGRESQL,
    "sqlite": SQLITE,
    "everything": EVERYTHING,
    "nothing": NOTHING,
}
DEFINITION = "CustomResourceDefinition"


def read(case: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / f"{case}.yaml").read_text(encoding="utf-8")))


def write(case: str, manifests: list[Manifest]) -> None:
    FOLDER.mkdir(exist_ok=True)
    text = yaml.safe_dump_all(manifests, sort_keys=False, width=120)
    (FOLDER / f"{case}.yaml").write_text(text, encoding="utf-8")


def comparable(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Return the manifests sorted, without custom resource definitions and without random data."""
    kept = [each for each in manifests if each["kind"] != DEFINITION]
    for each in kept:
        if each["kind"] == "Secret":
            each["data"] = dict.fromkeys(each["data"], "")
    return sorted(kept, key=lambda each: (each["kind"], each["metadata"]["name"]))


def pod_specs(manifests: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for each in manifests:
        spec = each.get("spec") or {}
        if each["kind"] == "Pod":
            yield each["metadata"]["name"], spec
        elif "template" in spec:
            yield each["metadata"]["name"], spec["template"]["spec"]


def named(manifests: Iterable[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name]
    return found
