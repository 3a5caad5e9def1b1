"""Probes of a process that serves no HTTP otherwise."""

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


def test_it_lives_from_the_start_and_is_ready_when_it_says_so() -> None:
    with ProbeServer("127.0.0.1", 0) as probes:
        assert ask(probes, "/healthz") == (200, "ok\n")
        assert ask(probes, "/readyz") == (503, "it is starting, or waits for the database\n")
        probes.readiness_error = lambda: ""
        probes.liveness_error = lambda: "the loop has not gone round"
        assert ask(probes, "/healthz?verbose") == (503, "the loop has not gone round\n")
        assert ask(probes, "/readyz") == (200, "ok\n")
        assert ask(probes, "/metrics")[0] == 404


def test_an_address_that_is_not_to_be_had_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            ProbeServer("127.0.0.1", port)
