"""Keep the records of pools in shadow mode, and which webhooks may veto loans: none of those that exist."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision: str | None = "0025"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "shadows",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_index("ix_shadows_generation", "shadows", ["generation"])
    op.add_column("webhooks", sa.Column("may_veto", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    with op.batch_alter_table("webhooks") as batch:
        batch.drop_column("may_veto")
    op.drop_table("shadows")
