"""Keep how each commit changed the fleet, so that it is known at any second between two checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision: str | None = "0030"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "fleet_changes",
        sa.Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_fleet_changes_time", "fleet_changes", ["at_s"])


def downgrade() -> None:
    op.drop_table("fleet_changes")
