"""Operators during database and API server outages: they wait, log once, and continue."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from scheduler.kubernetes.api_objects import ELASTIC_JOB, LEASE
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fault_proxy import Fault, FaultProxy
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

GONE, BACK = "the database is unavailable", "the database is available again"
NOBODY_THERE = "postgresql+psycopg://nobody:secret@127.0.0.1:9/ebbtide"


@contextmanager
def locked(operated: Operated) -> Iterator[None]:
    """Lock the database against all other writers."""
    with closing(sqlite3.connect(operated.url.removeprefix("sqlite:///"), timeout=60.0)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.rollback()


@contextmanager
def broken(operated: Operated) -> Iterator[None]:
    """Make every query for commands fail."""
    with closing(sqlite3.connect(operated.url.removeprefix("sqlite:///"), timeout=60.0)) as connection:
        connection.execute("ALTER TABLE inbox RENAME TO hidden")
        yield
        connection.execute("ALTER TABLE hidden RENAME TO inbox")


def holder(operated: Operated) -> str:
    lease = operated.cluster.get(LEASE, "ebbtide-operator", operated.namespace)
    return str(lease["spec"].get("holderIdentity") or "")


def test_locked_database_is_awaited(operated: Operated) -> None:
    operated.add_nodes(2)
    process = operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    with locked(operated):
        operated.submit("later", 8, 8)
        eventually(lambda: GONE in operated.log_of(process), what="it says so")
        assert operated.probe(process, "/healthz") == (200, "ok")
    operated.until_phase("later", "Running")
    assert operated.phase("llama") == "Running"
    eventually(lambda: BACK in operated.log_of(process), what="it says that it goes on")
    _was_told_once(operated, process)


def test_leader_without_database_steps_down_and_returns(operated: Operated) -> None:
    operated.add_nodes(2)
    process = operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    with broken(operated):
        operated.submit("later", 8, 8)
        eventually(lambda: not holder(operated), what="it stands back")
        assert process.poll() is None
    operated.until_phase("later", "Running")
    _was_told_once(operated, process)


def test_start_without_database_is_live_but_not_ready(operated: Operated) -> None:
    process = operated.start_operator(url=NOBODY_THERE)
    eventually(lambda: GONE in operated.log_of(process), what="it says so")
    assert operated.probe(process, "/healthz") == (200, "ok")
    assert operated.probe(process, "/readyz")[0] == 503
    assert "secret" not in operated.log_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


def test_api_server_outage_does_not_fail_liveness(operated: Operated, control_plane: ControlPlane) -> None:
    operated.add_nodes(1)
    process = operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    assert operated.probe(process, "/readyz") == (200, "ok")
    control_plane.kill_api()
    eventually(lambda: "is no longer the leader" in operated.log_of(process), what="it stops leading")
    assert operated.probe(process, "/healthz") == (200, "ok")
    control_plane.start_api()
    operated.submit("next", 8, 8)
    operated.cluster.patch(ELASTIC_JOB, "llama", operated.namespace, change={"spec": {"suspend": True}})
    operated.until_phase("next", "Running")
    assert process.poll() is None


def test_operator_without_lists_is_live_but_not_ready(
    operated: Operated, control_plane: ControlPlane, tmp_path: Path
) -> None:
    with FaultProxy(control_plane).running() as proxy:
        proxy.fault = lambda method, path: Fault(403) if "/pools" in path else Fault()
        process = operated.start_operator(proxy.kubeconfig(tmp_path))
        reported = (503, "not listed yet: pools")
        eventually(lambda: operated.probe(process, "/readyz") == reported, what="pools alone are not listed")
        assert operated.probe(process, "/healthz") == (200, "ok")
        assert operated.probe(process, "/anything")[0] == 404
        proxy.fault = lambda method, path: Fault()
        eventually(lambda: operated.probe(process, "/readyz") == (200, "ok"), what="it has listed pools")


def test_requests_and_state_are_counted(operated: Operated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    operated.add_nodes(1)
    operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]  # left untyped there
    counted = partial(registry.get_sample_value, "ebbtide_kubernetes_requests_total")
    assert counted({"verb": "create", "resource": "pods", "status": "200"})
    assert counted({"verb": "list", "resource": "elasticjobs", "status": "200"})
    took = registry.get_sample_value("ebbtide_kubernetes_request_duration_seconds_count", {"verb": "list"})
    assert took is not None
    assert took >= 8
    standing = {
        each: registry.get_sample_value("ebbtide_operator_standing", {"standing": each})
        for each in ("leading", "waiting", "blind", "no-database")
    }
    assert standing == {"leading": 1.0, "waiting": 0.0, "blind": 0.0, "no-database": 0.0}
    heard_at_s = registry.get_sample_value("ebbtide_kubernetes_heard_timestamp_seconds", {"resource": "pods"})
    assert heard_at_s is not None
    assert 0.0 <= time.time() - heard_at_s < 60.0


def _was_told_once(operated: Operated, process: subprocess.Popen[bytes]) -> None:
    assert process.poll() is None
    time.sleep(1.0)
    log = operated.log_of(process)
    assert log.count(GONE) == log.count(BACK) == 1
    assert "Traceback" not in log
