"""Keep webhooks with what is delivered to them, and simulations that were handed in; there are none before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision: str | None = "0006"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("url", sa.String, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("codes", sa.JSON, nullable=False),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("disabled_reason", sa.String, nullable=False),
        sa.Column("cursor", sa.BigInteger, nullable=False),
        sa.Column("dead_in_a_row", sa.Integer, nullable=False),
        sa.Column("secret_number", sa.Integer, nullable=False),
        sa.Column("old_secret_until_s", sa.Double, nullable=False),
        sa.Column("due_at_s", sa.Double, nullable=True),
        sa.Column("holder", sa.String, nullable=False),
        sa.Column("claimed_until_s", sa.Double, nullable=False),
    )
    op.create_index("ix_webhooks_id", "webhooks", ["id"], unique=True)
    op.create_table(
        "webhook_deliveries",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("webhook_id", sa.String, nullable=False),
        sa.Column("event_number", sa.BigInteger, nullable=False),
        sa.Column("code", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_at_s", sa.Double, nullable=False),
        sa.Column("ended_at_s", sa.Double, nullable=True),
        sa.Column("status", sa.Integer, nullable=True),
        sa.Column("error", sa.String, nullable=False),
    )
    op.create_index("ix_webhook_deliveries_id", "webhook_deliveries", ["id"], unique=True)
    op.create_index(
        "ix_webhook_deliveries_webhook_id_state_number", "webhook_deliveries", ["webhook_id", "state", "number"]
    )
    _create_simulations()


def _create_simulations() -> None:
    op.create_table(
        "simulations",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("policies", sa.JSON, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("jobs_total", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("playing", sa.String, nullable=False),
        sa.Column("jobs_done", sa.BigInteger, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("started_at_s", sa.Double, nullable=True),
        sa.Column("ended_at_s", sa.Double, nullable=True),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("holder", sa.String, nullable=False),
        sa.Column("claimed_until_s", sa.Double, nullable=False),
    )
    op.create_index("ix_simulations_id", "simulations", ["id"], unique=True)
    op.create_index("ix_simulations_owner", "simulations", ["owner"])
    op.create_index("ix_simulations_state", "simulations", ["state"])
    op.create_table(
        "simulation_texts",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("files", sa.LargeBinary, nullable=False),
        sa.Column("report", sa.LargeBinary, nullable=True),
    )


def downgrade() -> None:
    for table in ("simulation_texts", "simulations", "webhook_deliveries", "webhooks"):
        op.drop_table(table)
