"""The chart's values: what the schema takes and refuses, by Helm's own linter, without a cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.settings import Settings
from tests.chart import helm, manifests

SCHEMA = helm.CHART / "values.schema.json"
# Several processes of the API are replicas there.
SET_BY_THE_CHART = {
    "API_PROCESSES", "DATABASE_URL", "HOST", "PORT", "PROBE_PORT", "PUBLIC_URL", "RUN_DIR", "STORE_HOST", "STORE_PORT",
    "TOKEN_SECRET_FILE", "WEBHOOK_CA_FILE", "JOB_NAMESPACE", "LEASE_NAMESPACE", "WORKER_IMAGE", "EXECUTOR",
    "KUBECONFIG",
}  # fmt: skip


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return {**below, **both}


WRONG: list[dict[str, Any]] = [
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
    {"rendezvous": {"replicas": 2}},
    {"networkPolicy": {"apiFrom": [{}]}},
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
    {"prometheus": {"url": "https://user:password@prometheus"}},
    {"monitoring": {"serviceMonitor": {"interval": "often"}}},
    {**manifests.SQLITE, "operator": {"replicas": 2}},
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the linter says of the chart with each of the cases' values as its defaults, then with the wrong ones."""
    charts = [_chart(tmp_path_factory.mktemp("chart"), values) for values in (*manifests.CASES.values(), *WRONG)]
    return helm.lint(*charts)


def _chart(folder: Path, values: dict[str, Any]) -> Path:
    chart = folder / "ebbtide"
    shutil.copytree(helm.CHART, chart)
    given = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    (chart / "values.yaml").write_text(yaml.safe_dump(_merged(given, values)), encoding="utf-8")
    return chart


@helm.needed
@pytest.mark.parametrize("number", range(len(manifests.CASES)), ids=list(manifests.CASES))
def test_the_linter_has_nothing_to_say(told: list[list[str]], number: int) -> None:
    assert told[number] == []


@helm.needed
@pytest.mark.parametrize("number", range(len(WRONG)), ids=map(str, WRONG))
def test_unknown_and_wrong_values_are_refused(told: list[list[str]], number: int) -> None:
    assert "values.yaml" in told[len(manifests.CASES) + number]


def test_each_setting_is_either_a_value_or_the_charts_own() -> None:
    offered = set(json.loads(SCHEMA.read_text(encoding="utf-8"))["properties"]["settings"]["properties"])
    assert not offered & SET_BY_THE_CHART
    assert {name.upper() for name in Settings.model_fields} <= offered | SET_BY_THE_CHART


def test_every_value_has_a_default_and_every_default_stands_in_the_schema() -> None:
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert set(_names(values)) == set(_properties(schema, schema)) - {"global"}


def _names(values: dict[str, Any], above: str = "") -> list[str]:
    """Without settings, which have defaults of their own, and what is inside of free maps."""
    free = ("settings", "resources", "labels", "resourceAttributes")
    named = [(f"{above}{name}", name, value) for name, value in values.items()]
    inner = [
        each for path, name, value in named if isinstance(value, dict) and name not in free
        for each in _names(value, f"{path}.")
    ]  # fmt: skip
    return [path for path, _, _ in named] + inner


def _properties(part: dict[str, Any], schema: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for name, value in part.get("properties", {}).items():
        target = schema["$defs"][value["$ref"].rpartition("/")[2]] if "$ref" in value else value
        inner = [] if name in ("settings", "resources") else _properties(target, schema, f"{above}{name}.")
        found += [f"{above}{name}", *inner]
    return found
