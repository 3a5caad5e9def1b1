"""The command `schemathesis run` against a running service, with all its checks, as an outside tester uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.client import Client
from tests.clients.running_service import RunningService, run_service

TIMEOUT_S = 840.0
# Without these, the service would answer most requests with 429.
SETTINGS = {"rate_per_s": "1000000", "rate_burst": "1000000", "report_rate_per_s": "1000000"}
CONFIGURATION = """
[checks.negative_data_rejection]
# A document with too long a list may be larger than any request.
expected-statuses = ["400", "401", "403", "404", "405", "409", "412", "413", "422", "429"]

[checks.positive_data_acceptance]
# A valid document may be refused for reasons that no schema can express, such as a minimum above a maximum.
expected-statuses = ["2xx", "304", "401", "403", "404", "409", "412", "422", "429"]
"""
"""What an outside tester has to know about this service."""
SHORT_CONFIGURATION = f"""
[phases.coverage]
unexpected-methods = []
# The other phase tries each operation without a token.
checks = {{ ignored_auth = {{ enabled = false }} }}

[[operations]]
exclude-path-regex = "^/v1/(jobs|queues)$"
phases = {{ coverage = {{ enabled = false }} }}

{CONFIGURATION}
"""
"""Tries the values at the limits of the schema for lists and creations only: for all operations, it takes minutes."""
SHORT = (SHORT_CONFIGURATION, "examples,coverage", 1)
LONG = (CONFIGURATION, "examples,coverage,fuzzing,stateful", 20)
"""Configuration, phases, and generated requests of each operation in the phases that generate them."""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("configuration", "phases", "examples"),
    [pytest.param(*SHORT, id="short"), pytest.param(*LONG, id="long", marks=pytest.mark.full)],
)
def test_schemathesis_finds_nothing(configuration: str, phases: str, examples: int, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(configuration)
    with run_service(tmp_path, **SETTINGS) as service:
        _furnish(service)
        done = _attack(service, tmp_path, phases, examples)
        assert service.is_alive(), service.log()
        assert "Traceback" not in service.log()  # read before it stops, which cancels waiting requests
    assert done.returncode == 0, "\n".join(line[:300] for line in done.stdout.splitlines())


def _furnish(service: RunningService) -> None:
    """Create one of each resource that the document's examples name."""
    with Client(service.url, token=service.token) as client:
        client.create_pool({"name": "training", "kind": "training"})
        client.add_node({"name": "n0", "pool": "training", "gpu": "cpu", "gpus": 2})
        client.create_queue({"name": "research"})


def _attack(service: RunningService, folder: Path, phases: str, examples: int) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(folder / "schemathesis.toml"), "run"),
        *(f"{service.url}/openapi.json", "--url", service.url, "--header", f"Authorization: Bearer {service.token}"),
        *("--checks", "all", "--phases", phases, "--max-examples", str(examples)),
        *("--seed", "1", "--generation-database", "none", "--no-color", "--suppress-health-check", "all"),
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
