"""Keep the books of usage; a database from before has held GPUs and booked nothing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision: str | None = "0007"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("hour_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("queue", sa.String, primary_key=True),
        sa.Column("owner", sa.String, primary_key=True),
        sa.Column("gpu", sa.String, primary_key=True),
        sa.Column("is_lent", sa.Boolean, primary_key=True),
        sa.Column("gpu_s", sa.Double, nullable=False),
        sa.Column("lost_gpu_s", sa.Double, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("usage")
