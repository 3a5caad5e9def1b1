"""Keep the model that jobs train with their usage and allocations, and one comparison of savings a day.

Usage by model has a table of its own: a column in the primary key of `usage` would break releases that share the
database.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision: str | None = "0032"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "model_usage",
        sa.Column("hour_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("queue", sa.String, primary_key=True),
        sa.Column("owner", sa.String, primary_key=True),
        sa.Column("gpu", sa.String, primary_key=True),
        sa.Column("is_lent", sa.Boolean, primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("gpu_s", sa.Double, nullable=False),
        sa.Column("lost_gpu_s", sa.Double, nullable=False),
        sa.Column("owner_name", sa.String, nullable=False),
    )
    op.add_column("allocation_spans", sa.Column("model", sa.String, nullable=False, server_default=""))
    op.create_table(
        "daily_comparisons",
        sa.Column("day_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("daily_comparisons")
    op.drop_column("allocation_spans", "model")
    op.drop_table("model_usage")
