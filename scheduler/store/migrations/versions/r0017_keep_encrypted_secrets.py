"""Keep encrypted secrets of queues; a database from before has none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision: str | None = "0016"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "secrets",
        sa.Column("queue", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("master_key", "wrapped_key", "sealed_value")),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("changed_at_s", sa.Double, nullable=False),
        sa.Column("changed_by", sa.String, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("secrets")
