"""Keep sessions of the web console and one-time login codes; a database from before has none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision: str | None = "0014"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "login_codes",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("token_id", sa.String, nullable=False),
        sa.Column("principal", sa.JSON, nullable=False),
        sa.Column("user_expires_at_s", sa.Double, nullable=True),
        sa.Column("browser", sa.String, nullable=False),
        sa.Column("expires_at_s", sa.Double, nullable=False),
    )
    op.create_index("ix_login_codes_expires_at_s", "login_codes", ["expires_at_s"])
    op.create_table(
        "console_sessions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("token_id", sa.String, nullable=False),
        sa.Column("principal", sa.JSON, nullable=False),
        sa.Column("user_expires_at_s", sa.Double, nullable=True),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("expires_at_s", sa.Double, nullable=False),
    )
    op.create_index("ix_console_sessions_digest", "console_sessions", ["digest"], unique=True)
    op.create_index("ix_console_sessions_expires_at_s", "console_sessions", ["expires_at_s"])


def downgrade() -> None:
    for table in ("console_sessions", "login_codes"):
        op.drop_table(table)
