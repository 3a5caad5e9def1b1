"""deploy/compose.yaml pins images, uses existing paths and settings, and checks the health of every service."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.settings import Settings
from tests.chart.helm import CHART
from tests.chart.test_monitoring import rule_expressions
from tools.grafana_boards import render

DEPLOY = Path(__file__).parents[2] / "deploy"
promtool = shutil.which("promtool")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    return dict(read["services"])


def test_images_are_pinned_and_name_no_host(services: dict[str, Any]) -> None:
    images = {service["image"] for service in services.values()}
    tag, digest = r"([a-z-]+/)?[a-z-]+:v?\d+(\.\d+)+", "@sha256:[0-9a-f]{64}"
    for image in images:
        assert re.fullmatch(tag if image.startswith("ebbtide/") else tag + digest, image), image


def test_services_have_health_checks_and_valid_dependencies(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert ("healthcheck" in service) == (service["restart"] != "no"), name
        for needed, how in service.get("depends_on", {}).items():
            stays = services[needed]["restart"] != "no"
            assert how["condition"] == ("service_healthy" if stays else "service_completed_successfully"), name


def test_mounts_exist_and_ports_are_loopback(services: dict[str, Any]) -> None:
    for service in services.values():
        sources = [volume.partition(":")[0] for volume in service.get("volumes", ())]
        assert [source for source in sources if source.startswith(".") and not (DEPLOY / source).exists()] == []
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_agent_runs_ranks_in_the_worker_image_without_the_secrets_of_the_service(services: dict[str, Any]) -> None:
    agent = services["agent"]
    assert agent["image"] == "ebbtide/worker:0.1.0"
    assert agent["profiles"] == ["agent"], "it needs a join token first"
    assert "environment" not in agent, "the URL of the database has a password"
    assert not set(agent["volumes"]) & set(services["controller"]["volumes"])
    assert set(agent["volumes"]) <= set(services["prepare"]["volumes"]), "new volumes belong to root"


def test_gpus_of_the_machine_are_detected_and_given_to_the_agent(services: dict[str, Any]) -> None:
    override = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text(encoding="utf-8"))["services"]
    assert list(override) == ["agent"]
    gpu, cpu = override["agent"]["command"], services["agent"]["command"]
    assert [word for word in cpu if word not in gpu] == ["--gpus=2", "--gpu=cpu", "--gpu-memory=2GiB"]
    assert set(gpu) <= set(cpu)
    (devices,) = override["agent"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_settings_are_known(services: dict[str, Any]) -> None:
    known = {f"EBBTIDE_{name.upper()}" for name in Settings.model_fields}
    named = {name for service in services.values() for name in service.get("environment", {}) if name[:4] == "EBBT"}
    assert named <= known


def test_grafana_provisions_dashboards_and_data_source(services: dict[str, Any]) -> None:
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    (shown,) = [inside for source, inside in mounts.items() if (DEPLOY / source).resolve() == render.FOLDER]
    provisioning = DEPLOY / "grafana" / "provisioning"
    boards = yaml.safe_load((provisioning / "dashboards" / "ebbtide.yaml").read_text(encoding="utf-8"))
    assert [provider["options"]["path"] for provider in boards["providers"]] == [shown]
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))
    assert [(source["type"], source["isDefault"]) for source in sources["datasources"]] == [("prometheus", True)]


@pytest.mark.skipif(promtool is None, reason="no promtool: Debian's package prometheus has it")
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "prometheus" / "prometheus.yml", tmp_path)
    shutil.copy(CHART / "rules.yaml", tmp_path)
    command = [str(promtool), "check", "config", str(tmp_path / "prometheus.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(list(rule_expressions()))} rules found" in result.stdout
