"""Commands that wait survive a short outage of the service."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import pytest
from typer.testing import Result

from cli.exit_codes import ExitCode

Run = Callable[..., Result]


@pytest.fixture
def outage(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A job ends while a command waits for it. The first `away` requests find the service unreachable."""
    answered, number, state = httpx.ASGITransport.handle_async_request, count(), {"away": 0}

    async def away(transport: httpx.ASGITransport, request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and next(number) < state["away"]:
            raise httpx.ConnectError("gone")
        return await answered(transport, request)

    def time_passes(_: float) -> None:
        for decision in fleet.tick().decisions:
            fleet.client().cancel(decision.job_id)

    monkeypatch.setattr(httpx.ASGITransport, "handle_async_request", away)
    monkeypatch.setattr("time.sleep", time_passes)
    return state


def test_wait_survives_a_short_outage(run: Run, outage: dict[str, int]) -> None:
    outage["away"] = 8
    result = run("submit", "--name", "doomed", "--min", "1", "--wait", "-o", "json", "true")
    assert json.loads(result.stdout)["state"] == "cancelled", result.stderr
    assert result.stderr.count("gone; retrying") == 1


def test_wait_fails_after_a_long_outage(run: Run, outage: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.output.RETRY_TIMEOUT_S", 0.0)
    outage["away"] = 8
    result = run("submit", "--name", "doomed", "--min", "1", "--wait", "-o", "json", "true")
    assert (result.exit_code, result.stdout) == (ExitCode.UNAVAILABLE, "")
    assert "gone (start a service" in result.stderr
