"""Keep measured steps of plans; a database from before has none until jobs run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision: str | None = "0022"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "step_measurements",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_index("ix_step_measurements_generation", "step_measurements", ["generation"])


def downgrade() -> None:
    op.drop_table("step_measurements")
