"""Liveness and readiness probes."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from scheduler.telemetry.probes import ProbeServer


def ask(probes: ProbeServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{probes.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def test_server_is_live_from_the_start_and_ready_once_it_has_no_error() -> None:
    with ProbeServer("127.0.0.1", 0) as probes:
        assert ask(probes, "/healthz") == (200, "ok\n")
        assert ask(probes, "/readyz")[0] == 503
        probes.readiness_error = lambda: ""
        probes.liveness_error = lambda: "the loop hangs"
        assert ask(probes, "/healthz?verbose") == (503, "the loop hangs\n")
        assert ask(probes, "/readyz") == (200, "ok\n")
        assert ask(probes, "/metrics")[0] == 404


def test_error_names_an_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port}"):
            ProbeServer("127.0.0.1", port)
