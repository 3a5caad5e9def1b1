"""Keep which runs were begun and what node agents report; a database from before has neither."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision: str | None = "0003"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "begun_runs",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("doom", sa.JSON, nullable=True),
        sa.Column("ended", sa.JSON, nullable=True),
    )
    op.create_table(
        "agent_reports",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("agent_reports")
    op.drop_table("begun_runs")
