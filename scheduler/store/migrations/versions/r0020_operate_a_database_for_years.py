"""Mark runs of a restored database, name the oldest program that may use it, and index the filters of ended jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision: str | None = "0019"
branch_labels: str | None = None
depends_on: str | None = None

_INDEXES = {
    "ix_ended_jobs_state_list": ["state", "submitted_at_s", "id", "queue", "owner", "name", "owner_id"],
    "ix_ended_jobs_queue_list": ["queue", "state", "submitted_at_s", "id", "owner", "name", "owner_id"],
    "ix_ended_jobs_owner_list": ["owner", "state", "submitted_at_s", "id", "queue", "name", "owner_id"],
    "ix_ended_jobs_owner_id_list": ["owner_id", "state", "submitted_at_s", "id", "queue", "owner", "name"],
    "ix_ended_jobs_name": ["name"],
}


def upgrade() -> None:
    op.add_column("begun_runs", sa.Column("is_restored", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "schema_compatibility",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("oldest_revision", sa.String, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("ended_jobs", "name", type_=sa.String(collation="C"))  # names with a prefix are one range
    for name, columns in _INDEXES.items():
        op.create_index(name, "ended_jobs", columns)


def downgrade() -> None:
    for name in _INDEXES:
        op.drop_index(name, "ended_jobs")
    op.drop_table("schema_compatibility")
    op.drop_column("begun_runs", "is_restored")
