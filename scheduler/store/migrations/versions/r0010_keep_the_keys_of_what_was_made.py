"""Keep the idempotency keys of webhooks and simulations. Versions before cannot read commands with preconditions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision: str | None = "0009"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "creation_keys",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("document", sa.String, nullable=False),
        sa.Column("made", sa.String, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("creation_keys")
