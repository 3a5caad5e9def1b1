"""Describe submitted simulations; those from before have no description."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision: str | None = "0028"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("simulations", sa.Column("description", sa.String, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("simulations", "description")
