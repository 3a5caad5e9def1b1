"""Each failed authentication is in the access log, whatever kind of caller the token claims and status it gets."""

from __future__ import annotations

import json
import logging

import pytest

from scheduler.domain.worker_token import issue_agent_token, issue_worker_token
from scheduler.telemetry.logs import ACCESS_LOGGER
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import SECRET

REPORT = {"generation": 1, "step": 3}
STATEMENT = {"pod": "p", "address": "10.1.0.2"}
PROGRESS, AGENT, MACHINE = "/v1/jobs/train/progress", "/v1/jobs/train/agents/t0", "/v1/machines/m/report"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    logger = logging.getLogger(ACCESS_LOGGER)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    return caplog


def statuses(logged: pytest.LogCaptureFixture) -> list[int]:
    lines = [json.loads(message) for message in logged.messages]
    return [line["status"] for line in lines if line["event"] == "AuthenticationFailed"]


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/v1/jobs", "ebk_wrong", 401),
        ("GET", "/v1/jobs", "ebt_wrong", 403),
        ("POST", PROGRESS, "nope", 403),
        ("POST", PROGRESS, "ebk_wrong", 403),
        ("POST", PROGRESS, "ebt_wrong", 403),
        ("POST", AGENT, "eba_wrong", 403),
        ("POST", MACHINE, "nope", 403),
    ],
)
def test_wrong_token_is_logged(
    logged: pytest.LogCaptureFixture, method: str, path: str, token: str, status: int
) -> None:
    with (guarded := AuthenticatedService()).http:
        document = None if method == "GET" else REPORT if path == PROGRESS else STATEMENT
        assert guarded.request(method, path, token, document).status_code == status
    assert statuses(logged) == [status]


@pytest.mark.parametrize(("path", "prefix", "first"), [("/v1/jobs", "ebk_", 401), (AGENT, "eba_", 403)])
def test_throttled_failures_are_logged_too(
    logged: pytest.LogCaptureFixture, path: str, prefix: str, first: int
) -> None:
    with (guarded := AuthenticatedService(rate_burst=1, rate_per_s=0.001)).http:
        method, document = ("GET", None) if path == "/v1/jobs" else ("POST", STATEMENT)
        found = [guarded.request(method, path, f"{prefix}{number}", document).status_code for number in range(3)]
    assert found == statuses(logged) == [first, 429, 429]


def test_refusals_of_proven_callers_are_no_failed_authentications(logged: pytest.LogCaptureFixture) -> None:
    with (guarded := AuthenticatedService(report_rate_burst=1, report_rate_per_s=0.001)).http:
        worker, agent = issue_worker_token(SECRET, "train", 1), issue_agent_token(SECRET, "train")
        answers = [guarded.request("POST", PROGRESS, worker, REPORT).status_code for _ in range(2)]
        answers.append(guarded.request("POST", AGENT, agent, STATEMENT).status_code)
        answers.append(guarded.request("POST", "/v1/pools", guarded.token("eve", "viewer"), {}).status_code)
    assert answers == [404, 429, 404, 403]
    assert statuses(logged) == []
