"""Old and new API and controller side by side on one database across a migration: real processes, PostgreSQL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from ebbtide.client import Client
from scheduler.store.database import open_engine
from tests.e2e import machine_site
from tests.e2e.machine_site import MachineSite
from tests.loopback import find_free_port
from tests.next_release import REVISION, build_next_release
from tests.postgres_server import PostgresServer

PATIENCE_S = 180.0
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


def submit(client: Client, name: str, script: str = "true") -> str:
    document = {"name": name, "gpus": {"min": 1, "max": 1}, "command": ["sh", "-c", script]}
    return str(client.submit(document)["id"])


def test_old_and_new_release_share_a_database_across_a_migration(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_site, "TIMEOUT_S", PATIENCE_S)
    newer = build_next_release(tmp_path / "next")
    (tmp_path / "site").mkdir()
    site = MachineSite(tmp_path / "site", disconnect_s=PATIENCE_S, database_url=postgres.new_database())
    port = find_free_port()
    new_client = Client(f"http://127.0.0.1:{port}")
    try:
        site.open()
        site.join("m1", gpus=2)
        steady = submit(site.client, "steady", "while true; do echo step; sleep 1; done")
        site.wait(lambda: site.state(steady) == "running")
        environment = {**os.environ, **newer, "EBBTIDE_DATABASE_URL": site.database_url}
        subprocess.run([sys.executable, "-P", "-m", "cli", "migrate"], env=environment, check=True)
        assert _read_revision(site.database_url) == REVISION
        site.start("new-api", "api", EBBTIDE_PORT=str(port), **newer)
        site.start("new-controller", "controller", **newer)
        site.wait(new_client.is_ready)
        site.wait_for_success(submit(new_client, "new-api-old-controller"))
        site.stop("controller")
        site.wait_for_success(submit(site.client, "old-api-new-controller"))
        site.stop("api")
        site.start("api", "api")
        site.start("controller", "controller")
        site.wait(site.client.is_ready)
        site.stop("new-controller")
        last = submit(new_client, "old-controller-again")
        site.wait_for_success(last)
        for client in (site.client, new_client):
            names = {job["name"] for job in client.jobs()}
            assert names == {"steady", "new-api-old-controller", "old-api-new-controller", "old-controller-again"}
            assert (client.job(steady)["state"], client.job(steady)["generation"]) == ("running", 1)
    finally:
        new_client.close()
        site.close()


def _read_revision(url: str) -> str:
    engine = open_engine(url)
    with engine.connect() as connection:
        revision = str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
    engine.dispose()
    return revision
