"""Old and new API and controller side by side on one database across a migration: real processes, PostgreSQL.

The next release is a copy of this source tree with one more migration, a column that its code writes, and a field in
the bodies of jobs.
"""

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
from tests.postgres_server import PostgresServer

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0
MIGRATION = '''
"""What the next release adds."""
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{newest}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ended_jobs", sa.Column("cluster", sa.String, nullable=False, server_default=""))
    op.create_table("clusters", sa.Column("name", sa.String, primary_key=True))


def downgrade() -> None:
    op.drop_table("clusters")
    op.drop_column("ended_jobs", "cluster")
'''
CHANGES = {
    "store/sql_history.py": (
        '    submitted_at_s: Named[float] = Column(Double, server_default="0")\n',
        '    cluster: Named[str] = Column(String, server_default="")\n',
    ),
    "domain/job_state.py": ("    skipped_generation: int = 0\n", '    cluster: str = "next"\n'),
}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


def build_next_release(folder: Path) -> Path:
    """Return a source tree of the next release: its own `scheduler`, and links to the other packages."""
    folder.mkdir()
    for package in ("api", "cli", "baselines", "library"):
        (folder / package).symlink_to(ROOT / package)
    shutil.copytree(ROOT / "scheduler", folder / "scheduler", ignore=shutil.ignore_patterns("__pycache__"))
    versions = folder / "scheduler" / "store" / "migrations" / "versions"
    newest = max(path.name[1:5] for path in versions.glob("r*.py"))
    (versions / "r9999_next_release.py").write_text(MIGRATION.format(newest=newest).strip() + "\n", encoding="utf-8")
    for name, (line, addition) in CHANGES.items():
        path = folder / "scheduler" / name
        source = path.read_text(encoding="utf-8")
        assert source.count(line) == 1, name
        path.write_text(source.replace(line, line + addition), encoding="utf-8")
    return folder


def submit(client: Client, name: str, script: str = "true") -> str:
    document = {"name": name, "gpus": {"min": 1, "max": 1}, "command": ["sh", "-c", script]}
    return str(client.submit(document)["id"])


def test_old_and_new_release_share_a_database_across_a_migration(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_site, "TIMEOUT_S", PATIENCE_S)
    next_release = build_next_release(tmp_path / "next")
    (tmp_path / "site").mkdir()
    site = MachineSite(tmp_path / "site", disconnect_s=PATIENCE_S, database_url=postgres.new_database())
    # The root follows, because a virtual environment may put it first unless it is there already.
    newer = {"PYTHONPATH": os.pathsep.join(map(str, (next_release, next_release / "library", ROOT)))}
    port = find_free_port()
    new_client = Client(f"http://127.0.0.1:{port}")
    try:
        site.open()
        site.join("m1", gpus=2)
        steady = submit(site.client, "steady", "while true; do echo step; sleep 1; done")
        site.wait(lambda: site.state(steady) == "running")
        environment = {**os.environ, **newer, "EBBTIDE_DATABASE_URL": site.database_url}
        subprocess.run([sys.executable, "-P", "-m", "cli", "migrate"], env=environment, check=True)
        assert _read_revision(site.database_url) == "9999"
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
