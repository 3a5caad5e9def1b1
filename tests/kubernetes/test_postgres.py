"""Two operators on a PostgreSQL server that is killed and restarted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.kubernetes.api_objects import ELASTIC_JOB, uid_of
from scheduler.kubernetes.client import KubernetesClient
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually
from tests.postgres_server import PostgresServer

GONE = "the database is unavailable"


@pytest.fixture
def operated(
    control_plane: ControlPlane,
    definitions: None,
    cluster: KubernetesClient,
    kubelet: FakeKubelet,
    namespace: str,
    tmp_path: Path,
    disposable_postgres: PostgresServer,
) -> Iterator[Operated]:
    created = Operated(control_plane, cluster, kubelet, namespace, tmp_path, url=disposable_postgres.new_database())
    yield created
    created.close()
    assert all(gpus <= 8 for gpus in created.most_held.values()), f"booked twice: {created.most_held}"


def test_jobs_survive_database_and_leader(operated: Operated, disposable_postgres: PostgresServer) -> None:
    operated.add_nodes(2)
    both = [operated.start_operator(), operated.start_operator()]
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    (before,) = operated.pods()

    disposable_postgres.kill()
    operated.submit("later", 8, 8)
    eventually(lambda: any(GONE in operated.log_of(each) for each in both), what="who leads says so")
    disposable_postgres.start()
    operated.until_phase("later", "Running")
    assert [each.poll() for each in both] == [None, None]

    leader = operated.leader()
    leader.send_signal(signal.SIGKILL)
    leader.wait()
    operated.cluster.patch(ELASTIC_JOB, "later", operated.namespace, change={"spec": {"suspend": True}})
    operated.submit("last", 8, 8)
    operated.until_phase("last", "Running")
    assert uid_of(before) in {uid_of(pod) for pod in operated.pods()}, "llama heard nothing of all that"
