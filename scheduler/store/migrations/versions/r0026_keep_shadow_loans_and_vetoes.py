"""Keep the records of pools in shadow mode, the author of the switches of lending, and which webhooks may veto loans.

None of the webhooks that exist may.
"""

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
    op.add_column("state", sa.Column("lending_set_by", sa.String, nullable=False, server_default=""))
    op.add_column("state", sa.Column("lending_set_at_s", sa.Double, nullable=True))


def downgrade() -> None:
    for table, name in (("state", "lending_set_at_s"), ("state", "lending_set_by"), ("webhooks", "may_veto")):
        op.drop_column(table, name)
    op.drop_table("shadows")
