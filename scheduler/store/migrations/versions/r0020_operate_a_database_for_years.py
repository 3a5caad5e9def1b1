"""Mark runs of a restored database, name the oldest program that may use it, and index the filters of ended jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision: str | None = "0014"
branch_labels: str | None = None
depends_on: str | None = None

_FILTERS = ("state", "queue", "owner", "name")


def upgrade() -> None:
    op.add_column("begun_runs", sa.Column("is_restored", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "schema_compatibility",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("oldest_revision", sa.String, nullable=False),
    )
    for name in _FILTERS:
        others = [each for each in _FILTERS if each != name]
        op.create_index(f"ix_ended_jobs_{name}_list", "ended_jobs", [name, "submitted_at_s", "id", *others])


def downgrade() -> None:
    for name in _FILTERS:
        op.drop_index(f"ix_ended_jobs_{name}_list", "ended_jobs")
    op.drop_table("schema_compatibility")
    op.drop_column("begun_runs", "is_restored")
