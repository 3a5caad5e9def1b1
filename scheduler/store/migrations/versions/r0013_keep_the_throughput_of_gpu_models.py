"""Keep the throughput of GPU models; a database from before has none, and the next tick adds it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision: str | None = "0012"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "gpu_throughputs",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_index("ix_gpu_throughputs_generation", "gpu_throughputs", ["generation"])


def downgrade() -> None:
    op.drop_table("gpu_throughputs")
