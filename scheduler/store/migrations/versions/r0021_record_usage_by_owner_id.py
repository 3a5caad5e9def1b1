"""Record usage by owner id and display name, and index audit entries by actor id.

The column `owner` keeps its place in the primary key, so that an older release adds to the same table meanwhile. It
holds the id in rows with an `owner_name`, and the display name in others.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision: str | None = "0020"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("usage", sa.Column("owner_name", sa.String, nullable=False, server_default=""))
    op.create_index("ix_audit_log_actor_id_number", "audit_log", ["actor_id", "number"])


def downgrade() -> None:
    op.drop_index("ix_audit_log_actor_id_number", "audit_log")
    op.drop_column("usage", "owner_name")
