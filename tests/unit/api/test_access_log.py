"""The access log: what each setting logs, and that failed authentications are logged and limited."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from api.http.access_log import FAILURE_PERIOD_S, FAILURES_MAX, AccessLog
from api.identity.principals import Grant, Principal, Role
from scheduler.telemetry.logs import ACCESS_LOGGER

STATE = {
    "principal": Principal("ada", (Grant(Role.ADMIN),), "tok-1", subject="token:tok-1"),
    "route_template": "/v1/jobs/{job_id}",
}


def record(log: AccessLog, method: str, status: int = 200, *, address: str = "10.0.0.1", **state: Any) -> None:
    scope = {"client": (address, 1), "path": "/v1/jobs/x", "query_string": b"token=ebk_hidden"}
    log.record({**scope, "state": {**STATE, "request_id": "r-1", **state}}, method=method, status=status, seconds=0.5)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    logger = logging.getLogger(ACCESS_LOGGER)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])  # whatever an earlier test has configured
    monkeypatch.setattr(logger, "propagate", False)
    return caplog


@pytest.mark.parametrize(("setting", "count"), [("off", 0), ("changes", 1), ("all", 3)])
def test_setting_names_the_requests(logged: pytest.LogCaptureFixture, setting: str, count: int) -> None:
    log = AccessLog(setting)
    record(log, "GET")
    record(log, "POST", worker_caller="an agent")
    record(log, "DELETE")
    assert len(logged.messages) == count


def test_line_is_json_without_query(logged: pytest.LogCaptureFixture) -> None:
    record(AccessLog("changes"), "POST", 201)
    line = json.loads(logged.messages[0])
    assert line.pop("at").endswith("Z")
    assert line == {
        "event": "Request",
        "method": "POST",
        "route": "/v1/jobs/{job_id}",
        "status": 201,
        "duration_ms": 500.0,
        "principal": "ada",
        "token_id": "tok-1",
        "address": "10.0.0.1",
        "request_id": "r-1",
    }
    assert "ebk_hidden" not in logged.messages[0]


def test_failed_authentications_are_limited_by_address_and_counted(logged: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = AccessLog("off", monotonic_s=lambda: now_s)
    for _ in range(FAILURES_MAX + 7):
        record(log, "GET", 401)
    record(log, "GET", 401, address="10.0.0.2")
    assert len(logged.messages) == FAILURES_MAX + 1
    now_s = FAILURE_PERIOD_S + 1.0
    record(log, "GET")
    suppressed = json.loads(logged.messages[-1])
    assert (suppressed["event"], suppressed["address"], suppressed["suppressed"]) == (
        "AuthenticationFailuresSuppressed", "10.0.0.1", 7,
    )  # fmt: skip
    record(log, "GET", 401)
    assert json.loads(logged.messages[-1])["event"] == "AuthenticationFailed"
