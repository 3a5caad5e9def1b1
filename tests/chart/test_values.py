"""The schema of the chart's values, checked by Helm's linter without a cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.settings import Settings
from tests.chart import helm, manifests

SCHEMA = helm.CHART / "values.schema.json"
# API_PROCESSES is fixed because the API scales by replicas; a folder of profiles would need a volume.
CHART_SETTINGS = {
    "API_PROCESSES", "DATABASE_URL", "HOST", "PORT", "PROBE_PORT", "PUBLIC_URL", "RUN_DIR",
    "TOKEN_SECRET_FILE", "SECRETS_KEY_FILE", "WEBHOOK_CA_FILE", "JOB_NAMESPACE", "LEASE_NAMESPACE", "WORKER_IMAGE",
    "AGENT_IMAGE", "IMAGE_PULL_SECRETS", "EXECUTOR", "KUBECONFIG", "PROFILES_DIR",
    "OIDC_CLIENT_SECRET",  # extraEnv takes it from a Secret
    "TEMPORARY_MACHINE_S",  # machines of Slurm join a service, not an operator
}  # fmt: skip


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merge(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return {**below, **both}


INVALID_VALUES: list[dict[str, Any]] = [
    {"nonsense": 1},
    {"image": {"registry": "harbour"}},
    {"image": {"tag": "not a tag"}},
    {"image": {"pullPolicy": "Sometimes"}},
    {"crds": {"install": "yes"}},
    {"database": {"kind": "mysql"}},
    {"database": {"postgresql": {"port": 0}}},
    {"database": {"postgresql": {"url": "postgresql://user:password@host/ebbtide"}}},
    {"database": {"sqlite": {"size": "much"}}},
    {"jobNamespace": "Not A Name"},
    {"settings": {"HOST": "0.0.0.0"}},
    {"settings": {"POLICY": ["lyra"]}},
    {"api": {"replicas": 0}},
    {"api": {"resources": {"claims": []}}},
    {"operator": {"replicas": 1.5}},
    {"rendezvous": {}},
    {"networkPolicy": {"apiFrom": [{}]}},
    {"networkPolicy": {"jobsFrom": [{}]}},
    {"networkPolicy": {"egress": {"webhooks": True}}},
    {"networkPolicy": {"egress": {"oidc": {"to": [{}]}}}},
    {"networkPolicy": {"egress": {"oidc": {"ports": []}}}},
    {"networkPolicy": {"egress": {"tracing": {"ports": [0]}}}},
    {"tracing": {"endpoint": "collector:4317"}},
    {"tracing": {"sampler": "sometimes"}},
    {"tracing": {"samplerArg": 0.1}},
    {"tracing": {"resourceAttributes": {"team": "a,b=c"}}},
    {"tracing": {"headers": "authorization=secret"}},
    {"webhookAuthorities": {"pem": "-----BEGIN"}},
    {"settings": {"WEBHOOK_CA_FILE": "/nowhere"}},
    {"settings": {"PROMETHEUS_URL": "https://user:password@prometheus"}},
    {"priorityClassName": "System Critical"},
    {"podLabels": {"app.kubernetes.io/component": "mine"}},
    {"extraEnv": {"HTTPS_PROXY": "http://proxy"}},
    {"extraEnv": [{"value": "a"}]},
    {"ingress": {"enabled": True}},
    {"ingress": {"hosts": ["https://ebbtide.example.com"]}},
    {"ingress": {"tls": ["ebbtide-tls"]}},
    {"httpRoute": {"enabled": True, "hostnames": ["ebbtide.example.com"]}},
    {"uninstall": {"timeoutSeconds": 0}},
    {"uninstall": {"force": True}},
    {"prometheus": {"url": "https://user:password@prometheus"}},
    {"monitoring": {"serviceMonitor": {"interval": "often"}}},
    {**manifests.SQLITE, "operator": {"replicas": 2}},
]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return the linter's findings for the chart with each case's values, then with each set of invalid values."""
    charts = [
        _copy_chart(tmp_path_factory.mktemp("chart"), values) for values in (*manifests.CASES.values(), *INVALID_VALUES)
    ]
    return helm.lint(*charts)


def _copy_chart(folder: Path, values: dict[str, Any]) -> Path:
    chart = folder / "ebbtide"
    shutil.copytree(helm.CHART, chart)
    given = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    (chart / "values.yaml").write_text(yaml.safe_dump(_merge(given, values)), encoding="utf-8")
    return chart


@helm.needed
@pytest.mark.parametrize("number", range(len(manifests.CASES)), ids=list(manifests.CASES))
def test_linter_accepts_valid_values(findings: list[list[str]], number: int) -> None:
    assert findings[number] == []


@helm.needed
@pytest.mark.parametrize("number", range(len(INVALID_VALUES)), ids=map(str, INVALID_VALUES))
def test_linter_rejects_unknown_and_invalid_values(findings: list[list[str]], number: int) -> None:
    assert "values.yaml" in findings[len(manifests.CASES) + number]


def test_every_setting_is_offered_or_set_by_the_chart() -> None:
    offered = set(json.loads(SCHEMA.read_text(encoding="utf-8"))["properties"]["settings"]["properties"])
    assert not offered & CHART_SETTINGS
    assert {name.upper() for name in Settings.model_fields} <= offered | CHART_SETTINGS


def test_settings_have_the_descriptions_of_the_service() -> None:
    offered = json.loads(SCHEMA.read_text(encoding="utf-8"))["properties"]["settings"]["properties"]
    assert {name: value["description"] for name, value in offered.items()} == {
        name: Settings.model_fields[name.lower()].description for name in offered
    }


def test_every_value_has_a_description() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert [path for path, value in _list_values(schema) if "description" not in value] == []


def _list_values(part: dict[str, Any], above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in part.get("properties", {}).items():
        yield f"{above}{name}", value
        yield from _list_values(value, f"{above}{name}.")


def test_defaults_and_schema_have_the_same_values() -> None:
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert set(_list_paths(values)) == set(_list_schema_paths(schema, schema)) - {"global"}


def _list_paths(values: dict[str, Any], above: str = "") -> list[str]:
    """Return the paths of all values, except those inside settings and free-form maps."""
    free = ("settings", "resources", "labels", "resourceAttributes")
    named = [(f"{above}{name}", name, value) for name, value in values.items()]
    inner = [
        each for path, name, value in named if isinstance(value, dict) and name not in free
        for each in _list_paths(value, f"{path}.")
    ]  # fmt: skip
    return [path for path, _, _ in named] + inner


def _list_schema_paths(part: dict[str, Any], schema: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for name, value in part.get("properties", {}).items():
        target = schema["$defs"][value["$ref"].rpartition("/")[2]] if "$ref" in value else value
        inner = [] if name in ("settings", "resources") else _list_schema_paths(target, schema, f"{above}{name}.")
        found += [f"{above}{name}", *inner]
    return found
