"""The next release: a copy of this source tree with one more migration, a column that its code writes, and a field in
the bodies of jobs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
REVISION = "9999"
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


def build_next_release(folder: Path) -> dict[str, str]:
    """Write the source tree, with its own `scheduler` and links to other packages.

    Returns:
        The environment variables with which Python finds it.
    """
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
    # The root follows, because a virtual environment may put it first unless it is there already.
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, folder / "library", ROOT)))}
