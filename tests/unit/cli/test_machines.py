"""`ebbtide machines`: machines and join tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from api.openapi import load_examples
from cli.exit_codes import ExitCode
from scheduler.package_version import get_package_version
from tests.unit.cli.conftest import START_S, AppTransport, InProcessService, Run

Ask = Callable[..., Any]


@pytest.fixture
def joined(fleet: InProcessService) -> InProcessService:
    """A service with a machine m0 of two L4."""
    with fleet.client() as client:
        token = client.create_join_token("training")["secret"]
    document = {**load_examples()["JoinDocument"], "name": "m0", "version": get_package_version()}
    transport = AppTransport(fleet.app)
    with httpx.Client(transport=transport, base_url="http://ebbtide.test") as http:
        headers = {"Authorization": f"Bearer {token}"}
        answer = http.post("/v1/machines:join", json={**document, "clock_s": START_S + 1.0}, headers=headers)
    assert answer.status_code == 201, answer.text
    return fleet


def test_machines_are_listed(ask: Ask, run: Run, joined: InProcessService) -> None:
    assert [(each["name"], each["gpu"], each["estimated"]) for each in ask("machines")] == [("m0", "l4", False)]
    line = run("machines", "list").output.splitlines()[1]
    assert line.split() == ["m0", "training", "2", "GPUs", "l4", "10.0.7.3", get_package_version(), "never"]


def test_a_machine_is_shown_with_its_hardware(ask: Ask, run: Run, joined: InProcessService) -> None:
    assert ask("machines", "get", "m0")["inventory"]["nics"] == [{"name": "eth0", "speed_bits_per_s": 10**11}]
    shown = run("machines", "get", "m0").output
    for part in ("NVIDIA L4", "pcie-host", "eth0 100 Gb/s", "/checkpoints: writable, 4.0 TB free"):
        assert part in shown


def test_a_removed_machine_is_listed_as_such(ask: Ask, run: Run, joined: InProcessService) -> None:
    assert ask("machines", "remove", "m0")["revoked_at_s"] == START_S + 1.0
    assert "removed" in run("machines").output
    assert run("machines", "remove", "m1").exit_code == ExitCode.NOT_FOUND


def test_tokens_are_created_listed_and_deleted(ask: Ask, run: Run, fleet: InProcessService) -> None:
    created = ask("machines", "token", "--pool", "training", "--uses", "3", "--expires", "30m")
    assert (created["uses_left"], created["expires_at_s"] - created["created_at_s"]) == (3, 1800.0)
    secret = run("machines", "token", "--pool", "serving", "-q").stdout.strip()
    assert secret.startswith("ebj_")
    assert [token["pool"] for token in ask("machines", "tokens")].count("serving") == 1
    assert secret not in run("machines", "tokens").output
    ask("machines", "delete-token", created["id"])
    assert [token["pool"] for token in ask("machines", "tokens")] == ["serving"]


@pytest.mark.parametrize(
    "words",
    [
        ("--pool", "trainin"),
        ("--pool", "training", "--uses", "0"),
        ("--pool", "training", "--expires", "soon"),
        ("--pool", "training", "--expires", "30d"),
    ],
)
def test_an_invalid_token_is_refused(run: Run, fleet: InProcessService, words: tuple[str, ...]) -> None:
    assert run("machines", "token", *words).exit_code == 2
    assert fleet.store.machines.list_tokens(after="", limit=1) == ()
