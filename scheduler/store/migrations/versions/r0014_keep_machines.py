"""Keep joined machines, join tokens and estimated GPU profiles; a database from before has none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision: str | None = "0013"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "machines",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("joined_at_s", sa.Double, nullable=False),
        sa.Column("seen_at_s", sa.Double, nullable=True),
        sa.Column("revoked_at_s", sa.Double, nullable=True),
    )
    op.create_index("ix_machines_digest", "machines", ["digest"], unique=True)
    op.create_table(
        "join_tokens",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("pool", sa.String, nullable=False),
        sa.Column("uses_left", sa.BigInteger, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("expires_at_s", sa.Double, nullable=False),
    )
    op.create_index("ix_join_tokens_digest", "join_tokens", ["digest"], unique=True)
    op.create_table(
        "estimated_gpus",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("profile_json", sa.String, nullable=False),
        sa.Column("machine", sa.String, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
    )


def downgrade() -> None:
    for table in ("estimated_gpus", "join_tokens", "machines"):
        op.drop_table(table)
