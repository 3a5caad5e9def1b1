"""Keep a digest of each audit entry that covers the entry before; entries from before have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision: str | None = "0017"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("audit_log", sa.Column("digest", sa.String, nullable=True))
    op.create_table(
        "audit_chain",
        sa.Column("end", sa.String, primary_key=True),
        sa.Column("digest", sa.String, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("audit_chain")
    op.drop_column("audit_log", "digest")
