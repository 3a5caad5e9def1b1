"""Verbs that wait for an end: a service that is away for a moment is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import pytest
from typer.testing import Result

Run = Callable[..., Result]


@pytest.fixture
def looks(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A job ends while somebody waits. The first `away` looks at it find nobody."""
    answered, number, told = httpx.ASGITransport.handle_async_request, count(), {"away": 0}

    async def away(transport: httpx.ASGITransport, request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and next(number) < told["away"]:
            raise httpx.ConnectError("gone")
        return await answered(transport, request)

    def time_passes(_: float) -> None:
        for decision in fleet.tick().decisions:
            fleet.client().cancel(decision.job_id)

    monkeypatch.setattr(httpx.ASGITransport, "handle_async_request", away)
    monkeypatch.setattr("time.sleep", time_passes)
    return told


def test_waiting_outlasts_a_service_that_is_away_for_a_moment(run: Run, looks: dict[str, int]) -> None:
    looks["away"] = 8
    result = run("submit", "--name", "doomed", "--min", "1", "--wait", "-o", "json")
    assert json.loads(result.stdout)["state"] == "cancelled", result.stderr
    assert result.stderr.count("does not answer: gone; asking again") == 1


def test_waiting_ends_where_nobody_answers_for_long(
    run: Run, looks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.output.PATIENCE_S", 0.0)
    looks["away"] = 8
    result = run("submit", "--name", "doomed", "--min", "1", "--wait", "-o", "json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "does not answer: gone (start a service" in result.stderr
