"""Keep measured times of the way back of recalled nodes; a database from before has none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision: str | None = "0027"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "return_times",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_index("ix_return_times_generation", "return_times", ["generation"])


def downgrade() -> None:
    op.drop_table("return_times")
